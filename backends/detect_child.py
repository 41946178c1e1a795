"""Child process of detection: imports torch and at most one vendor's package, and prints the devices as JSON.

Each answer is a line, written as soon as it is there: if the next card hangs, those before it are known. It imports
nothing of anychip, and never a CUDA shim (transfer_to_npu, gpu_migration, transfer_to_supa): autoload is off, because
torch_supa's autoload imports one.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
from collections.abc import Callable
from typing import Any


def pci_address(properties: Any) -> str:
    """Return the address in `lspci -D`'s form; "" if PyTorch has none (torch.cuda has pci_bus_id from 2.8 on)."""
    domain, bus, device = (getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device"))
    if domain is None or bus is None or device is None:
        return ""
    return f"{domain:04x}:{bus:02x}:{device:02x}.0"


def ask(package: str, device_type: str, only: int | None, say: Callable[[dict[str, Any]], None]) -> None:
    """Import `package` (empty: none), and say the facts of `device_type`, then each device, or the `only` one.

    `module:function` in place of a package: the function makes a stand-in for torch's module of the device. Memory in
    bytes. Raises anything.
    """
    import torch

    package, _, maker = package.partition(":")
    imported = importlib.import_module(package) if package else None
    module = getattr(imported, maker)() if maker else torch.get_device_module(device_type)
    count = int(module.device_count()) if module.is_available() else 0
    say(
        {
            "torch": str(torch.__version__),
            "cuda": torch.version.cuda,
            "hip": torch.version.hip,
            "private_name": torch._C._get_privateuse1_backend_name(),
            "count": count,
        }
    )
    for index in range(count) if only is None else (only,):
        say(described(module, index))


def described(module: Any, index: int) -> dict[str, Any]:
    """Return the facts of one device; `error` if it does not answer: the others must not suffer from it."""
    try:
        properties = module.get_device_properties(index)
        return {
            "name": str(getattr(properties, "name", "") or module.get_device_name(index)),
            "memory_bytes": int(getattr(properties, "total_memory", 0) or 0),
            "arch": str(getattr(properties, "gcnArchName", "") or ""),
            "uuid": str(getattr(properties, "uuid", "") or ""),
            "pci": pci_address(properties),
        }
    except Exception as error:  # Vendors raise every kind.
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        reason = lines[0][:200] if lines else type(error).__name__
        return {"name": "", "memory_bytes": 0, "arch": "", "error": reason}


def main() -> None:
    """Print JSON objects, one a line: `detect_child.py PACKAGE TYPE [INDEX]`.

    The first has the common facts, the others a device each; or there is one `error`. Vendors' own prints go to
    standard error.
    """
    answers = os.dup(1)
    os.dup2(2, 1)

    def say(answer: dict[str, Any]) -> None:
        os.write(answers, json.dumps(answer).encode() + b"\n")

    try:
        ask(sys.argv[1], sys.argv[2], int(sys.argv[3]) if len(sys.argv) > 3 else None, say)
    except Exception as error:  # Vendors raise bare Exception, ImportError, RuntimeError, AssertionError.
        cause = error.__cause__ or error
        say({"error": f"{type(cause).__name__}: {cause}"})
    with contextlib.suppress(OSError):
        sys.stderr.flush()
    os._exit(0)  # Vendors' exit handlers may hang or abort.


if __name__ == "__main__":
    main()
