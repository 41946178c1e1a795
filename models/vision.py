"""torchvision, with an import five times faster.

Owns: that import; everything else in anychip says `from models.vision import torchvision`. torchvision 0.29 imports
torch._dynamo, 1.5 s of a process's start, for one question that only `roi_align` under `torch.compile` asks. Here it
finds that question alone, answered by the real module once code asks it.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

_DYNAMO = ("torch._dynamo", "torch._dynamo.utils")


def _imported() -> Any:
    """Import torchvision. If it needs more of torch._dynamo, import it again with the real one, which takes longer."""
    if "torch._dynamo" in sys.modules or "torchvision" in sys.modules:
        return importlib.import_module("torchvision")
    before = set(sys.modules)
    package, utils = stand_ins = [ModuleType(name) for name in _DYNAMO]
    package.__path__ = []
    package.utils = utils  # type: ignore[attr-defined]
    later = lambda device_type: importlib.import_module(_DYNAMO[1]).is_compile_supported(device_type)  # noqa: E731
    utils.is_compile_supported = later  # type: ignore[attr-defined]
    sys.modules.update(zip(_DYNAMO, stand_ins, strict=True))
    try:
        return importlib.import_module("torchvision")
    except (ImportError, AttributeError):
        for name in set(sys.modules) - before:
            if name.partition(".")[0] == "torchvision":
                del sys.modules[name]
    finally:
        for name in _DYNAMO:
            del sys.modules[name]
    return importlib.import_module("torchvision")


torchvision: Any = _imported()
