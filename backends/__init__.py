"""Chips: detection, memory, engines. No images, no HTTP; imports neither app nor models."""

import pkgutil
from typing import TYPE_CHECKING, Any

from backends.contract.backend import Backend as Backend
from backends.contract.backend import Choice as Choice
from backends.contract.backend import CompileOptions as CompileOptions
from backends.contract.backend import Device as Device
from backends.contract.backend import EngineRefusal as EngineRefusal
from backends.contract.backend import Executable as Executable
from backends.contract.backend import LoadedNetwork as LoadedNetwork
from backends.contract.backend import LoadReport as LoadReport
from backends.contract.backend import Memory as Memory
from backends.contract.backend import Network as Network
from backends.contract.backend import Probe as Probe
from backends.contract.backend import Started as Started
from backends.contract.backend import Telemetry as Telemetry
from backends.contract.backend import Unbuilt as Unbuilt
from backends.contract.errors import BackendError as BackendError
from backends.contract.errors import BackendUnavailableError as BackendUnavailableError
from backends.contract.errors import DeviceLostError as DeviceLostError
from backends.contract.errors import EngineRefusedError as EngineRefusedError
from backends.contract.errors import NotConvertedError as NotConvertedError
from backends.contract.errors import OutOfDeviceMemoryError as OutOfDeviceMemoryError
from backends.contract.errors import WrongAnswersError as WrongAnswersError
from backends.hooks import register_release_hook as register_release_hook
from backends.hooks import run_release_hooks as run_release_hooks

if TYPE_CHECKING:
    from backends.engines.cache import EngineCache as EngineCache
    from backends.engines.cache import private_folder as private_folder
    from backends.operators import fallback_counts as fallback_counts
    from backends.registry import BACKENDS as BACKENDS
    from backends.registry import choose as choose
    from backends.registry import device_files as device_files
    from backends.registry import open_backend as open_backend
    from backends.registry import report as report

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
