"""Puts the CPU kernels in place when it is imported, in a process that was started over a stub driver.

Owns: the order in which that must happen, and the stub's knobs. It can be a plugin of pytest (-p) and of the
service (--plugins), by its dotted name. The process needs the variables of tests/support/stub_drivers.py.
"""

from __future__ import annotations

import ctypes
import importlib
import os

import torch

DEVICE_TYPE = os.environ["STUB_DEVICE"]
COUNT = 2
MEMORY_BYTES: int | None = 16 * 2**30
_DRIVER = ctypes.CDLL({"cuda": "libcudart.so.13", "npu": "libascendcl.so"}[DEVICE_TYPE])
_KEPT: list[torch.library.Library] = []  # A library takes its operators along when it is collected.


def kernels() -> int:
    """How many device kernels have run: that it grows proves that the device, and not the CPU, did the work."""
    return int(torch.ops.stubs.kernels())


def set_knob(name: str, value: int) -> None:
    """`memory`, `other`: bytes; `copy_us`: of an asynchronous copy; `fail`: the driver's error number, 0 for none.

    `refuse_lock`: the error number of CUDA's cudaHostRegister.
    """
    if not _DRIVER.stub_set(name.encode(), ctypes.c_int64(value)):
        raise ValueError(f"the stub has no knob {name!r}")


def _import_torchvision() -> None:
    """Also where its C++ part cannot be loaded because it was built for another torch.

    Its registrations of shapes then fail on operators that nobody has declared. The networks need none of them.
    """
    try:
        importlib.import_module("torchvision")
    except RuntimeError as error:
        if "operator torchvision::nms does not exist" not in str(error):
            raise
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _KEPT.append(library)
        importlib.import_module("torchvision")


def _install() -> None:
    _import_torchvision()  # First, because its operators are replaced too.
    if DEVICE_TYPE == "npu":
        importlib.import_module("torch_npu")
    torch.ops.load_library(os.path.join(os.environ["STUB_DIR"], "cpu_kernels.so"))
    torch.get_device_module(DEVICE_TYPE).init()
    torch.ops.stubs.install()


_install()
