"""anychip on Ray Serve: the whole service in every replica, one accelerator a replica (docs/kubernetes.md).

Ray routes, scales and replaces replicas; batches, deadlines and workers stay the service's own.
"""

from __future__ import annotations

import fcntl
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

from ray import serve
from ray.serve import Application

from anychip_hosting.asgi import Hosted, create
from app.config import Settings

# Ray's name for an accelerator -> the replica's request to Ray, and our name for the device. Ray shows a replica only
# its own GPU (NVIDIA, AMD) or NPU. For resources that a node was only started with (--resources '{"MLU": 8}') it counts
# how many are taken, not which.
_ACCELERATORS: Mapping[str, tuple[Mapping[str, Any], str]] = {
    "CPU": ({"num_cpus": 2}, "cpu"),
    "GPU": ({"num_gpus": 1}, "auto"),
    "NPU": ({"resources": {"NPU": 1}}, "npu"),
    "MLU": ({"resources": {"MLU": 1}}, "mlu"),
    "DCU": ({"resources": {"DCU": 1}}, "dcu"),
}
_ONLY_COUNTED = ("MLU", "DCU")


def build(arguments: Mapping[str, Any]) -> Application:
    """Build the application for `args` of a Serve config file: `accelerator`, CPU, GPU, NPU, MLU or DCU, and
    `settings`.

    Replicas, autoscaling and resources can be set in the same file, under `deployments`, name `anychip`. Raises
    ValueError for an unknown accelerator, ValidationError for senseless settings.
    """
    accelerator = str(arguments.get("accelerator", "CPU"))
    if accelerator not in _ACCELERATORS:
        raise ValueError(f"there is no accelerator {accelerator!r}; there is {', '.join(_ACCELERATORS)}")
    actor_options, device = _ACCELERATORS[accelerator]
    given = {"device": device, **(arguments.get("settings") or {})}
    settings = Settings(**given)
    deployment = serve.deployment(
        name="anychip",
        ray_actor_options=dict(actor_options),
        # The service has queues of its own, which refuse in good time; Ray should not hold requests back from batches.
        max_ongoing_requests=128,
        autoscaling_config={"min_replicas": 1, "max_replicas": 4, "target_ongoing_requests": 16},
        graceful_shutdown_timeout_s=settings.drain_s + 15,
        health_check_timeout_s=30,
    )
    replica: Application = deployment(serve.ingress(_on_a_replica(given, accelerator in _ONLY_COUNTED))()).bind()
    return replica


def _on_a_replica(given: Mapping[str, Any], claims: bool) -> Callable[[], Hosted]:

    def application() -> Hosted:
        if not claims:
            return create(Settings(**given))
        device, lock = claim(given["device"])
        return create(Settings(**{**given, "device": device}), held=lock)

    return application


def claim(device: str) -> tuple[str, IO[str]]:
    """Claim a device that no other process has, until the lock is closed. Raises BackendUnavailableError."""
    from backends import BackendUnavailableError, choose

    for name in choose(device).devices:
        lock = (Path(tempfile.gettempdir()) / f"anychip-{name.replace(':', '-')}.lock").open("a")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            continue
        return name, lock
    raise BackendUnavailableError(f"Every device of {device} serves another replica on this machine.")
