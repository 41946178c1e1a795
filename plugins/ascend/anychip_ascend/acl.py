"""Huawei's pyACL, which comes with CANN: a card, its memory and its copies, without torch_npu.

Owns: the one initialisation of a process, ACL's codes, and how much is taken on the card. Must not know networks.

Functions, their parameters and what they return are those of pyACL's source as Huawei publishes it (2026, model.cpp,
rt_memory.cpp, rt_synchronize.cpp, media_jpeg.cpp); constants and codes those of CANN's headers (Ascend/pytorch,
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
from backends.engines.compiled import imported

HOST_TO_DEVICE, DEVICE_TO_HOST = 1, 2  # aclrtMemcpyKind
_HUGE_FIRST = 0  # aclrtMemMallocPolicy
_HBM_MEM = 1  # aclrtMemAttr; of a card without HBM, ACL answers for its DDR.
_REPEAT_INITIALIZE = 100002  # torch_npu has done it.


class AclCard:
    """The card of this process. It stands in for `torch.npu`, as far as TorchBackend and detection ask of it.

    `soc`: its kind, as atc wants it. `acl`: pyACL itself, for what returns no code.
    """

    def __init__(self) -> None:
        """Raises EngineRefusedError without pyACL, RuntimeError where it cannot be initialised."""
        self.acl = imported("acl", "source CANN's set_env.sh")
        code = self.acl.init()
        if code not in (0, _REPEAT_INITIALIZE):
            raise RuntimeError(self._failure("init", code))
        self.soc, self._context, self._taken_bytes = "", 0, 0
        self._pinned: dict[int, int] = {}  # pointer -> bytes

    def call(self, name: str, *arguments: object) -> Any:
        """What a function of pyACL's returns beside its code. Raises RuntimeError, worded as torch_npu's."""
        answer = attrgetter(name)(self.acl)(*arguments)
        *values, code = answer if isinstance(answer, tuple) else (answer,)
        if code:
            raise RuntimeError(self._failure(name, code))
        return values[0] if len(values) == 1 else tuple(values)

    def _failure(self, name: str, code: int) -> str:
        said = str(self.acl.get_recent_err_msg() or "").strip().splitlines()
        return f"acl.{name}, error code is {code}" + (f": {said[0]}" if said else "")

    def set_device(self, target: str) -> None:
        """Open the card, in this thread; `target` as torch_npu would call it, such as `npu:0`."""
        self.call("rt.set_device", int(target.partition(":")[2] or 0))
        self._context = self.call("rt.get_context")
        self.soc = self.acl.get_soc_name()

    def enter(self, target: str) -> None:
        """Work on the card in this thread; opens it where nothing has."""
        if self._context:
            self.call("rt.set_context", self._context)
        else:
            self.set_device(target)

    def is_available(self) -> bool:
        """As far as pyACL is here."""
        return True

    def device_count(self) -> int:
        """Those that this process may use."""
        return int(self.call("rt.get_device_count"))

    def get_device_properties(self, index: int) -> SimpleNamespace:
        """Opens the card and leaves it again. Raises RuntimeError."""
        self.call("rt.set_device", index)
        _, total = self.call("rt.get_mem_info", _HBM_MEM)
        name = self.acl.get_soc_name()
        self.call("rt.reset_device", index)
        return SimpleNamespace(name=name, total_memory=total)

    def memory_allocated(self, _: str) -> int:
        """Bytes that networks and buffers of this process take."""
        return self._taken_bytes

    memory_reserved = memory_allocated

    def mem_get_info(self, target: str) -> tuple[int, int]:
        """Free and all bytes of the card, in any thread."""
        self.enter(target)
        free, total = self.call("rt.get_mem_info", _HBM_MEM)
        return int(free), int(total)

    def empty_cache(self) -> None:
        """Nothing is kept that is not used."""

    def count(self, size_bytes: int) -> None:
        """Memory that ACL takes by itself, or gives back (less than 0)."""
        self._taken_bytes += size_bytes

    def take(self, size_bytes: int) -> int:
        """Memory of the card."""
        pointer: int = self.call("rt.malloc", size_bytes, _HUGE_FIRST)
        self.count(size_bytes)
        return pointer

    def give_back(self, pointer: int, size_bytes: int) -> None:
        """What `take` has returned."""
        self.count(-size_bytes)
        self.call("rt.free", pointer)

    def pinned(self, size_bytes: int) -> Pixels:
        """Zeros uint8 [size_bytes] from which the card copies while it computes; freed with its last view."""
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
        """Whether an array lies where memory begins that `pinned` has given."""
        return array.flags.c_contiguous and self._pinned.get(array.ctypes.data, 0) >= array.nbytes

    def copy(self, target: int, source: int, size_bytes: int, kind: int, stream: int) -> None:
        """Begin a copy, of pinned memory alone: before CANN 8.5, 310P and 310B copy no other on a stream.

        There "an unpredictable error may occur" otherwise (hiascend.com, canncommercial/800, aclcppdevg_03_0106).
        """
        self.call("rt.memcpy_async", target, size_bytes, source, size_bytes, kind, stream)

    def silence(self) -> str:
        """What the card says to the smallest copy there and back; empty when it comes out right."""
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
    """Do all of these, though some fail: a lost card refuses to give anything back."""
    for step in steps:
        try:
            step()
        except RuntimeError:
            continue


@functools.cache
def card() -> AclCard:
    """The one of this process."""
    return AclCard()
