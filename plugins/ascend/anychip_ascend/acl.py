"""Huawei's pyACL, which comes with CANN: a card, its memory and its copies, without torch_npu.

Functions, their parameters and results are those of pyACL's source as Huawei publishes it (2026, model.cpp,
rt_memory.cpp, rt_synchronize.cpp); constants and codes those of CANN's headers (Ascend/pytorch,
third_party/acl/inc/acl: acl_base.h, acl_rt.h, error_codes/*.h). Unverified on hardware.
"""

from __future__ import annotations

import ctypes
import functools
import weakref
from collections.abc import Callable
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import numpy as np

from backends.contract.backend import Array, Pixels
from backends.engines.engine import imported

HOST_TO_DEVICE, DEVICE_TO_HOST = 1, 2  # aclrtMemcpyKind
_HUGE_FIRST = 0  # aclrtMemMallocPolicy
_HBM_MEM = 1  # aclrtMemAttr; on a card without HBM, ACL answers for its DDR.
_REPEAT_INITIALIZE = 100002  # torch_npu has done it.


class AclCard:
    """Card of this process. It stands in for `torch.npu` in the calls of TorchBackend and detection.

    `soc`: its kind, as atc takes it. `acl`: pyACL itself, for functions that return no code.
    """

    def __init__(self) -> None:
        """Initialise pyACL. Raises EngineRefusedError without pyACL, RuntimeError if it cannot be initialised."""
        self.acl = imported("acl", "source CANN's set_env.sh")
        code = self.acl.init()
        if code not in (0, _REPEAT_INITIALIZE):
            raise RuntimeError(self._failure("init", code))
        self.soc, self._context, self._taken_bytes = "", 0, 0
        self._pinned: dict[int, int] = {}  # pointer -> bytes

    def call(self, name: str, *arguments: object) -> Any:
        """Call a function of pyACL; return its results without the code. Raises RuntimeError, worded as torch_npu's."""
        answer = attrgetter(name)(self.acl)(*arguments)
        *values, code = answer if isinstance(answer, tuple) else (answer,)
        if code:
            raise RuntimeError(self._failure(name, code))
        return values[0] if len(values) == 1 else tuple(values)

    def _failure(self, name: str, code: int) -> str:
        lines = str(self.acl.get_recent_err_msg() or "").strip().splitlines()
        return f"acl.{name}, error code is {code}" + (f": {lines[0]}" if lines else "")

    def set_device(self, device: str | int) -> None:
        """Open the card in this thread; `device`: its number, or its name in torch_npu, such as `npu:0`."""
        self.call("rt.set_device", int(str(device).rpartition(":")[2]))
        self._context = self.call("rt.get_context")
        self.soc = self.acl.get_soc_name()

    def enter(self, target: str) -> None:
        """Use the card in this thread; open it if no thread has."""
        if self._context:
            self.call("rt.set_context", self._context)
        else:
            self.set_device(target)

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return int(self.call("rt.get_device_count"))

    def get_device_properties(self, index: int) -> SimpleNamespace:
        """Return a card's name and memory; open and reset the card for it. Raises RuntimeError."""
        self.call("rt.set_device", index)
        _, total = self.call("rt.get_mem_info", _HBM_MEM)
        name = self.acl.get_soc_name()
        self.call("rt.reset_device", index)
        return SimpleNamespace(name=name, total_memory=total)

    def memory_allocated(self, _: str) -> int:
        """Return the bytes that networks and buffers of this process take."""
        return self._taken_bytes

    memory_reserved = memory_allocated

    def mem_get_info(self, target: str) -> tuple[int, int]:
        """Return the free and the total bytes of the card; any thread may call it."""
        self.enter(target)
        free, total = self.call("rt.get_mem_info", _HBM_MEM)
        return int(free), int(total)

    def empty_cache(self) -> None:
        """Do nothing: unused memory is never kept."""

    def count(self, size_bytes: int) -> None:
        """Count memory that ACL takes by itself, or gives back (less than 0)."""
        self._taken_bytes += size_bytes

    def take(self, size_bytes: int) -> int:
        pointer: int = self.call("rt.malloc", size_bytes, _HUGE_FIRST)
        self.count(size_bytes)
        return pointer

    def give_back(self, pointer: int, size_bytes: int) -> None:
        self.count(-size_bytes)
        self.call("rt.free", pointer)

    def pinned(self, size_bytes: int) -> Pixels:
        """Allocate zeros uint8 [size_bytes] from which the card copies while it computes; freed with the last view."""
        pointer = self.call("rt.malloc_host", size_bytes)
        memory = (ctypes.c_uint8 * size_bytes).from_address(pointer)
        self._pinned[pointer] = size_bytes
        weakref.finalize(memory, self._unpin, pointer).atexit = False
        array: Pixels = np.ctypeslib.as_array(memory)
        array[:] = 0
        return array

    def _unpin(self, pointer: int) -> None:
        self._pinned.pop(pointer, None)
        self.acl.rt.free_host(pointer)

    def is_pinned(self, array: Array) -> bool:
        """Return True if an array begins where memory of `pinned` begins and fits into it."""
        return array.flags.c_contiguous and self._pinned.get(array.ctypes.data, 0) >= array.nbytes

    def copy(self, target: int, source: int, size_bytes: int, kind: int, stream: int) -> None:
        """Begin a copy, of pinned memory alone: before CANN 8.5, 310P and 310B copy no other on a stream.

        There "an unpredictable error may occur" otherwise (hiascend.com, canncommercial/800, aclcppdevg_03_0106).
        """
        self.call("rt.memcpy_async", target, size_bytes, source, size_bytes, kind, stream)

    def silence(self) -> str:
        """Return why the smallest copy to the card and back fails; empty if it succeeds."""
        array: Array = np.array([2], np.int32)
        answer = np.zeros_like(array)
        try:
            self.call("rt.synchronize_device")
            pointer = self.take(array.nbytes)
            try:
                self.call("rt.memcpy", pointer, 4, array.ctypes.data, 4, HOST_TO_DEVICE)
                self.call("rt.memcpy", answer.ctypes.data, 4, pointer, 4, DEVICE_TO_HOST)
            finally:
                self.give_back(pointer, array.nbytes)
        except RuntimeError as error:
            return str(error)
        return "" if answer == array else f"2 becomes {answer[0]} there"


def released(*steps: Callable[[], object]) -> None:
    """Run all steps, even if some fail: a lost card refuses to free anything."""
    for step in steps:
        try:
            step()
        except RuntimeError:
            continue


@functools.cache
def card() -> AclCard:
    """Return the one card of this process."""
    return AclCard()
