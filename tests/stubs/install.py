"""Used inside a child that runs over a stub driver: puts the CPU kernels in place, and turns the stub's knobs.

Owns: the order in which that must happen. The child is started with the variables of tests/stub_drivers.py.
"""

from __future__ import annotations

import ctypes
import importlib
import os

import torch

_DRIVERS = {"cuda": "libcudart.so.13", "npu": "libascendcl.so"}


def install(device_type: str) -> None:
    """Make the operators of `device_type` ("cuda" or "npu") compute. Call it before any of them is used."""
    import_torchvision()
    if device_type == "npu":
        importlib.import_module("torch_npu")
    torch.ops.load_library(os.path.join(os.environ["STUB_DIR"], "cpu_kernels.so"))
    torch.get_device_module(device_type).init()
    # It replaces what is registered now, torchvision's operators too: hence the import above.
    torch.ops.stubs.install()


def import_torchvision() -> None:
    """Import torchvision, also where its C++ part cannot be loaded because it was built for another torch.

    Its registrations of shapes then fail on operators that nobody has declared. The models need none of them.
    """
    try:
        import torchvision
    except RuntimeError as error:
        if "operator torchvision::nms does not exist" not in str(error):
            raise
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _KEPT.append(library)
        import torchvision

    assert torchvision


_KEPT: list[torch.library.Library] = []  # A library takes its operators along when it is collected.


def kernels() -> int:
    """How many device kernels have run: that it grows proves that the device, and not the CPU, did the work."""
    return int(torch.ops.stubs.kernels())


def set_knob(device_type: str, name: str, value: int) -> None:
    """`memory`, `other`: bytes; `copy_us`: of an asynchronous copy; `fail`: the driver's error number, 0 for none."""
    driver = ctypes.CDLL(_DRIVERS[device_type])
    if not driver.stub_set(name.encode(), ctypes.c_int64(value)):
        raise ValueError(f"the stub has no knob {name!r}")
