"""Plugin that puts the CPU kernels in place when it is imported, in a process that runs over a stub driver.

Owns: the order in which that must happen, and the stub's knobs. It can be a plugin of pytest (-p) and of the
service (--plugins), by its dotted name. The process needs the variables of tests/support/stub_drivers.py.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import warnings

import torch

DEVICE_TYPE = os.environ["STUB_DEVICE"]
COUNT = 2
MEMORY_BYTES: int | None = 16 * 2**30
_DRIVER = ctypes.CDLL({"cuda": "libcudart.so.13", "npu": "libascendcl.so"}[DEVICE_TYPE])


def kernels() -> int:
    """Return how many device kernels have run: its growth proves that the device, and not the CPU, did the work."""
    return int(torch.ops.stubs.kernels())


def set_knob(name: str, value: int) -> None:
    """Set `memory`, `other`: bytes; `copy_us`: of an asynchronous copy; `fail`: the driver's error number, 0: none.

    `refuse_lock`: the error number of cudaHostRegister, or of aclrtHostRegisterV2.
    """
    if not _DRIVER.stub_set(name.encode(), ctypes.c_int64(value)):
        raise ValueError(f"the stub has no knob {name!r}")


def _install() -> None:
    importlib.import_module("torchvision")  # First, because its operators are replaced too.
    if DEVICE_TYPE == "npu":
        with warnings.catch_warnings():  # 2.10.0 imports parts of PyTorch that are deprecated.
            warnings.simplefilter("ignore")
            importlib.import_module("torch_npu")
    torch.ops.load_library(os.path.join(os.environ["STUB_DIR"], "cpu_kernels.so"))
    torch.get_device_module(DEVICE_TYPE).init()
    torch.ops.stubs.install()


_install()
