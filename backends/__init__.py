"""Chips: detection, memory, engines. No images, no HTTP; imports neither app nor models."""

import pkgutil
from typing import TYPE_CHECKING, Any

from backends.contract.backend import (
    DEFAULTS,
    Backend,
    Choice,
    CompileOptions,
    Device,
    EngineRefusal,
    Executable,
    LoadedNetwork,
    LoadReport,
    Memory,
    Network,
    Probe,
    Started,
    Telemetry,
    Unbuilt,
)
from backends.contract.errors import (
    BackendError,
    BackendUnavailableError,
    DeviceLostError,
    EngineRefusedError,
    NotConvertedError,
    OutOfDeviceMemoryError,
    WrongAnswersError,
)
from backends.hooks import register_release_hook, run_release_hooks
from backends.vendors.table import Facts

if TYPE_CHECKING:
    from backends.engines.cache import EngineCache, private_folder
    from backends.operators import fallback_counts
    from backends.registry import BACKENDS, choose, device_files, open_backend, report

__all__ = [
    "BACKENDS",
    "DEFAULTS",
    "Backend",
    "BackendError",
    "BackendUnavailableError",
    "Choice",
    "CompileOptions",
    "Device",
    "DeviceLostError",
    "EngineCache",
    "EngineRefusal",
    "EngineRefusedError",
    "Executable",
    "Facts",
    "LoadReport",
    "LoadedNetwork",
    "Memory",
    "Network",
    "NotConvertedError",
    "OutOfDeviceMemoryError",
    "Probe",
    "Started",
    "Telemetry",
    "Unbuilt",
    "WrongAnswersError",
    "choose",
    "device_files",
    "fallback_counts",
    "open_backend",
    "private_folder",
    "register_release_hook",
    "report",
    "run_release_hooks",
]

_WITH_TORCH = {
    **dict.fromkeys(("EngineCache", "private_folder"), "backends.engines.cache"),
    "fallback_counts": "backends.operators",
    **dict.fromkeys(("BACKENDS", "choose", "device_files", "open_backend", "report"), "backends.registry"),
}
"""Names that need torch, by module: imported when first used, as the server has no torch."""


def __getattr__(name: str) -> Any:
    if name not in _WITH_TORCH:
        raise AttributeError(f"backends has no {name}")
    return pkgutil.resolve_name(f"{_WITH_TORCH[name]}:{name}")
