"""What Triton's clients and tools ask of a server beside inference: configuration, statistics, the repository's index.

Owns: the JSON forms, which are also those of the gRPC messages (app.grpc). Must not know HTTP or gRPC.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from app.errors import invalid_request
from app.link import Link, ModelState
from app.observability.triton_statistics import VERSION
from app.protocols import ultralytics
from app.protocols.open_inference import NORMAL_PRIORITY
from app.protocols.options import PRIORITY
from app.protocols.signatures import PIXELS, find, signature_of
from app.protocols.wire import BYTES
from models import OutputSpec, PixelModel

_STATES = {
    ModelState.READY: "READY",
    ModelState.ON_DEMAND: "READY",
    ModelState.STARTING: "LOADING",
    ModelState.UNAVAILABLE: "UNAVAILABLE",
    ModelState.UNLOADED: "UNAVAILABLE",
}
"""Ours, and Triton's word for it."""


def configuration(link: Link, name: str, version: str = "") -> dict[str, Any]:
    """A model's configuration as Triton would have it: shapes without the batch, which comes in front.

    Raises MODEL_NOT_FOUND.
    """
    served = find(link, name, version)
    described = signature_of(link, name, version)
    settings = link.settings
    # Of images, one input is all a request has. Those that make up their data (load generators) skip what is
    # optional, and made-up bytes are no images.
    model = served.model
    images = isinstance(model, PixelModel)
    skipped = {spec.name for spec in described.inputs if spec.name != PIXELS} if images else set()
    tensors = {
        "input": [
            {**_tensor(spec, described.batched), **({"optional": True} if spec.name in skipped else {})}
            for spec in described.inputs
        ],
        "output": [_tensor(spec, described.batched) for spec in described.outputs],
    }
    if isinstance(model, PixelModel) and name not in link.cascades and ultralytics.is_offered(settings, served):
        tensors = ultralytics.tensors_of(model)
    return {
        "name": name,
        "platform": described.platform,
        "backend": "anychip",
        "version_policy": {"latest": {"num_versions": 1}},
        "max_batch_size": settings.max_images if described.batched else 0,
        **tensors,
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
    dims = list(spec.shape[1:] if batched else spec.shape)
    tensor: dict[str, Any] = {
        "name": spec.name,
        "data_type": "TYPE_STRING" if spec.datatype == BYTES else f"TYPE_{spec.datatype}",
        "dims": dims or [1],
    }
    if not dims:  # Triton has no tensors without dimensions; this is how it says that only the batch is there.
        tensor["reshape"] = {"shape": []}
    return tensor


def statistics(link: Link, name: str = "", version: str = "") -> list[dict[str, Any]]:
    """ "model_stats": of one model, or of all. Raises MODEL_NOT_FOUND."""
    chosen = [find(link, name, version)] if name else list(link.models.values())
    return [served.statistics.as_json(served.model.name) for served in chosen]


def index(link: Link, ready_only: bool = False) -> list[dict[str, str]]:
    """Every model with its state: READY, LOADING or UNAVAILABLE."""
    models = []
    for name in link.models:
        ours, reason = link.administration.state(name)
        state = _STATES[ours]
        reason = "unloaded" if ours is ModelState.UNLOADED else reason
        if state == "READY" or not ready_only:
            shown, _, version = name.partition("@")
            models.append({"name": shown, "version": version or VERSION, "state": state, "reason": reason})
    return models


def check_parameters(names: Iterable[str]) -> None:
    """Of a load or unload. Raises INVALID_REQUEST for those that would replace a model's configuration or files."""
    for name in names:
        if name != "unload_dependents":
            raise invalid_request(f"the parameter {name!r} is not read here: models are what --models names")
