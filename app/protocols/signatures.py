"""Models as the Open Inference Protocol and Triton's clients ask for them, in JSON in the form of gRPC's messages."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import orjson

from anychip_base.extras import version
from app.config.values import sizes_of, split
from app.errors import invalid_request
from app.link import Link, ModelState, ServedModel
from app.observability.triton_statistics import of_version
from app.protocols.options import NORMAL_PRIORITY, PRIORITY
from app.protocols.wire import BYTES, IMAGE, INPUT, PIXELS, PREDICTIONS
from models import Model, OutputSpec, PixelModel, TensorModel
from models.contract.cascade import Cascade

EXTENSIONS = (
    "binary_tensor_data",
    "classification",
    "model_configuration",
    "model_repository",
    "model_repository(unload_dependents)",
    "schedule_policy",
    "statistics",
)
"""Extensions in Triton's words; its clients ask for these."""
_STATES = {
    ModelState.READY: "READY",
    ModelState.ON_DEMAND: "READY",
    ModelState.STARTING: "LOADING",
    ModelState.UNAVAILABLE: "UNAVAILABLE",
    ModelState.UNLOADED: "UNAVAILABLE",
}
"""Our states, and Triton's words for them."""
_FORMATS = {PIXELS: "FORMAT_NHWC", INPUT: "FORMAT_NCHW"}


@dataclass(frozen=True, slots=True)
class Signature:
    """A model as its metadata shows it; `batched`: the first dimension of every tensor is the batch."""

    platform: str
    inputs: tuple[OutputSpec, ...]
    outputs: tuple[OutputSpec, ...]
    batched: bool = True


def signature(served: ServedModel) -> Signature:
    """Return the model's inputs (of images, one of them a request) and outputs."""
    if served.signature is None or served.signature[0] is not served.model:
        served.signature = served.model, _signature(served, served.model)
    kept: Signature = served.signature[1]
    return kept


def _signature(served: ServedModel, model: Model) -> Signature:
    if isinstance(model, TensorModel):
        inputs, outputs = (
            tuple(OutputSpec(spec.name, spec.datatype, spec.wire_shape(model.batched)) for spec in specs)
            for specs in (model.inputs, model.results)
        )
        return Signature(model.platform, inputs, outputs, model.batched)
    assert isinstance(model, PixelModel)
    height, width, channels = model.input_shape
    images = [OutputSpec(IMAGE, BYTES, (-1,)), OutputSpec(PIXELS, "UINT8", (-1, height, width, channels))]
    if served.floats is not None:
        images.append(OutputSpec(INPUT, "FP32", (-1, channels, height, width)))
    return Signature("pytorch_module", tuple(images), (*model.answers, OutputSpec(PREDICTIONS, BYTES, (-1,))))


def cascade_signature(cascade: Cascade) -> Signature:
    """Return the signature of a cascade: encoded images in, and the answer of `:predict` out, as JSON."""
    image, predictions = OutputSpec(IMAGE, BYTES, (-1,)), OutputSpec(PREDICTIONS, BYTES, (-1,))
    return Signature(cascade.platform, (image,), (predictions,))


def _view(link: Link, name: str, version: str = "") -> Signature:
    """Return the tensors that metadata and configuration list of a model: all of them, or those for a client of
    `--compat`. Requests may name the rest, too. An input whose only dimension is the batch gets one more: load
    generators cannot fill one that has none. Raises MODEL_NOT_FOUND.
    """
    served, cascade = link.find(name, version), link.cascades.get(name)
    shown = signature(served) if cascade is None else cascade_signature(cascade)
    inputs, outputs = shown.inputs, shown.outputs
    if cascade is None and isinstance(served.model, PixelModel) and "image-client" in split(link.settings.compat):
        inputs = tuple(spec for spec in inputs if spec.name == PIXELS)
        outputs = tuple(spec for spec in outputs if spec.name == "probabilities") or outputs
    filled = (replace(each, shape=(*each.shape, 1)) if len(each.shape) == shown.batched else each for each in inputs)
    return replace(shown, inputs=tuple(filled), outputs=outputs)


def server_metadata() -> dict[str, Any]:
    """Return the server's metadata in the protocol's form."""
    return {"name": "anychip", "version": version(), "extensions": list(EXTENSIONS)}


def metadata(link: Link, name: str, version: str = "") -> dict[str, Any]:
    """Return a model's metadata in the protocol's form; "parameters" says how it is served. Raises MODEL_NOT_FOUND."""
    model = link.find(name, version).model
    described = _view(link, name, version)
    tensors = {
        key: [{"name": spec.name, "datatype": spec.datatype, "shape": list(spec.shape)} for spec in specs]
        for key, specs in (("inputs", described.inputs), ("outputs", described.outputs))
    }
    served_on = [
        {"device": each.device, "engine": each.engine, "precision": each.precision, "errors": each.errors}
        for each in link.administration.served_on(model.name)
    ]
    parameters: dict[str, Any] = {"task": model.task, "architecture": model.architecture, "weights": model.weights}
    if model.weights_sha256:
        parameters["weights_sha256"] = model.weights_sha256
    return {
        "name": name,
        "versions": link.versions(name),
        "platform": described.platform,
        **tensors,
        "parameters": {**parameters, "labels": list(model.labels), "served_on": served_on},
    }


def configuration(link: Link, name: str, version: str = "") -> dict[str, Any]:
    """Return a model's configuration in Triton's form: shapes without the batch, which comes in front.

    Raises MODEL_NOT_FOUND.
    """
    served, described = link.find(name, version), _view(link, name, version)
    settings, model = link.settings, served.model
    inputs = [_tensor(spec, described.batched) for spec in described.inputs]
    texts: dict[str, str] = {}
    if isinstance(model, PixelModel):
        for each in inputs:
            each["format"] = _FORMATS.get(each["name"], "FORMAT_NONE")
            if len(inputs) > 1:  # A request has only one of them.
                each["optional"] = True
        texts = {"task": model.task, "labels": orjson.dumps(model.labels).decode()}
    return {
        "name": name,
        "platform": described.platform,
        "backend": "anychip",
        "version_policy": {"latest": {"num_versions": 1}},
        "max_batch_size": settings.max_images if described.batched else 0,
        "input": inputs,
        "output": [_tensor(spec, described.batched) for spec in described.outputs],
        "parameters": {key: {"string_value": text} for key, text in texts.items()},
        "dynamic_batching": {
            "preferred_batch_size": list(sizes_of(settings.batch_sizes)),
            "max_queue_delay_microseconds": round(settings.max_wait_ms * 1e3),
            "priority_levels": PRIORITY.high,
            "default_priority_level": NORMAL_PRIORITY,
            "default_queue_policy": {
                "timeout_action": "REJECT",
                "default_timeout_microseconds": round(settings.timeout_ms * 1e3),
                "allow_timeout_override": True,
                "max_queue_size": settings.queue_size,
            },
        },
    }


def _tensor(spec: OutputSpec, batched: bool) -> dict[str, Any]:
    data_type = "TYPE_STRING" if spec.datatype == BYTES else f"TYPE_{spec.datatype}"
    return {"name": spec.name, "data_type": data_type, "dims": list(spec.shape[batched:])}


def statistics(link: Link, name: str = "", version: str = "") -> list[dict[str, Any]]:
    """Return "model_stats" of one model, or of all. Raises MODEL_NOT_FOUND."""
    chosen = [link.find(name, version)] if name else list(link.models.values())
    return [served.statistics.as_json(served.model.name) for served in chosen]


def index(link: Link, ready_only: bool = False) -> list[dict[str, str]]:
    """List every model with its state: READY, LOADING or UNAVAILABLE."""
    models = []
    for name in link.models:
        ours, reason = link.administration.state(name)
        state = _STATES[ours]
        reason = "unloaded" if ours is ModelState.UNLOADED else reason
        if state == "READY" or not ready_only:
            shown, version = of_version(name)
            models.append({"name": shown, "version": version, "state": state, "reason": reason})
    return models


def check_parameters(names: Iterable[str]) -> None:
    """Raise INVALID_REQUEST for any parameter of a load or unload but `unload_dependents`."""
    for name in names:
        if name != "unload_dependents":
            raise invalid_request(f"the parameter {name!r} is not read here: models are what --models names")
