"""What a chip is: detection, memory, engines. No images, no HTTP; imports neither app nor models."""

from backends.contract.backend import (
    DEFAULTS,
    Backend,
    CompileOptions,
    Device,
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
    OutOfDeviceMemoryError,
    WrongAnswersError,
)
from backends.engines.cache import EngineCache
from backends.hooks import register_release_hook, run_release_hooks
from backends.operators.operators import fallback_counts, register_operator_libraries
from backends.registry import BACKENDS, Choice, choose, device_files, open_backend, report
from backends.vendors.table import Facts

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
    "EngineRefusedError",
    "Executable",
    "Facts",
    "LoadReport",
    "LoadedNetwork",
    "Memory",
    "Network",
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
    "register_operator_libraries",
    "register_release_hook",
    "report",
    "run_release_hooks",
]
