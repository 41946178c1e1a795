"""Answers for Triton's clients and tools beside inference: configuration, statistics, the repository's index.

Owns: the JSON forms, which are also those of the gRPC messages (plugins/grpc). Must not know HTTP or gRPC.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import orjson

from app.errors import invalid_request
from app.link import Link, ModelState
from app.observability.triton_statistics import of_version
from app.protocols import ultralytics
from app.protocols.open_inference import NORMAL_PRIORITY
from app.protocols.options import PRIORITY
from app.protocols.signatures import view
from app.protocols.tensors import INPUT, PIXELS
from app.protocols.wire import BYTES
from models import OutputSpec, PixelModel

_STATES = {
    ModelState.READY: "READY",
    ModelState.ON_DEMAND: "READY",
    ModelState.STARTING: "LOADING",
    ModelState.UNAVAILABLE: "UNAVAILABLE",
    ModelState.UNLOADED: "UNAVAILABLE",
}
"""Our states, and Triton's words for them."""
_FORMATS = {PIXELS: "FORMAT_NHWC", INPUT: "FORMAT_NCHW"}


def configuration(link: Link, name: str, version: str = "") -> dict[str, Any]:
    """Return a model's configuration in Triton's form: shapes without the batch, which comes in front.

    Raises MODEL_NOT_FOUND.
    """
    served, described = link.find(name, version), view(link, name, version)
    settings, model = link.settings, served.model
    inputs = [_tensor(spec, described.batched) for spec in described.inputs]
    texts: dict[str, str] = {}
    if isinstance(model, PixelModel):
        for each in inputs:
            each["format"] = _FORMATS.get(each["name"], "FORMAT_NONE")
            if len(inputs) > 1:  # A request has only one of them.
                each["optional"] = True
        texts = {"task": model.task, "labels": orjson.dumps(model.labels).decode()}
        if name not in link.cascades and ultralytics.is_offered(settings, served):
            texts["metadata"] = ultralytics.metadata(model)
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
            "preferred_batch_size": list(settings.ladder),
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
