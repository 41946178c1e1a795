"""Models as the Open Inference Protocol shows them: names, datatypes and shapes of their inputs and outputs.

Owns: a model's signature, its metadata and the server's. Must not know a transport or how a request is answered.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from app.config import split
from app.link import Link, ServedModel
from app.observability.metrics import version
from app.protocols import ultralytics
from app.protocols.tensors import IMAGE, INPUT, PIXELS, PREDICTIONS
from app.protocols.wire import BYTES
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


def view(link: Link, name: str, version: str = "") -> Signature:
    """Return the tensors that metadata and configuration list of a model: all of them, or those for a client of
    `--compat`. Requests may name the rest, too. An input whose only dimension is the batch gets one more: load
    generators cannot fill one that has none. Raises MODEL_NOT_FOUND.
    """
    shown = _shown(link, name, version)
    return replace(
        shown,
        inputs=tuple(
            replace(spec, shape=(*spec.shape, 1)) if len(spec.shape) == shown.batched else spec for spec in shown.inputs
        ),
    )


def _shown(link: Link, name: str, version: str) -> Signature:
    served = link.find(name, version)
    if (cascade := link.cascades.get(name)) is not None:
        return cascade_signature(cascade)
    full, model = signature(served), served.model
    if not isinstance(model, PixelModel):
        return full
    if ultralytics.is_offered(link.settings, served):
        normalised, rows = ultralytics.tensors_of(model)
        return replace(full, inputs=(normalised,), outputs=(rows,))
    if "image-client" in split(link.settings.compat):
        scores = tuple(spec for spec in full.outputs if spec.name == "probabilities") or full.outputs
        return replace(full, inputs=tuple(spec for spec in full.inputs if spec.name == PIXELS), outputs=scores)
    return full


def server_metadata() -> dict[str, Any]:
    """Return the server's metadata in the protocol's form."""
    return {"name": "anychip", "version": version(), "extensions": list(EXTENSIONS)}


def metadata(link: Link, name: str, version: str = "") -> dict[str, Any]:
    """Return a model's metadata in the protocol's form; "parameters" says how it is served. Raises MODEL_NOT_FOUND."""
    model = link.find(name, version).model
    described = view(link, name, version)
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
