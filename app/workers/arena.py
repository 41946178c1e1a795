"""The arena: one piece of shared memory in which pixels travel to the workers, and results come back.

    slot: │ input, as many bytes as the pool says │ place for results, RESULT_BYTES │

Owns: the memory (a memfd, not /dev/shm: containers give that 64 MB), its division into pools of equal slots, and which
slots are free. Must not know what is in a slot. The server writes inputs, workers write results; a slot number is all
that is sent.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

RESULT_BYTES = 256 << 10
"""Place for results in each slot. The system gives memory for what is used of it; larger ones: app.workers.results."""
_ALIGNMENT_BYTES = 4096  # A slot on its own pages never shares a cache line or a page with a neighbour.


@dataclass(frozen=True)
class Pool:
    """`count` slots of `slot_bytes` bytes, the first at `offset_bytes`, each `stride_bytes` after the last.

    The place for results is `result_offset_bytes` after the slot's begin.
    """

    slot_bytes: int
    count: int
    offset_bytes: int
    stride_bytes: int
    result_offset_bytes: int


class Arena:
    """Shared memory in pools of slots. A child process gets the descriptor, and maps the same memory."""

    def __init__(self, pools: Sequence[tuple[int, int]]) -> None:
        """`pools`: (bytes a slot, slots) of each pool. The system gives memory when a slot is first used."""
        layout: list[Pool] = []
        offset = 0
        for slot_bytes, count in pools:
            if slot_bytes < 1 or count < 1:
                raise ValueError(f"a pool needs slots of at least one byte, not {count} of {slot_bytes}")
            result_offset = -(-slot_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
            stride = result_offset + RESULT_BYTES
            layout.append(Pool(slot_bytes, count, offset, stride, result_offset))
            offset += stride * count
        fd = os.memfd_create("anychip-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, offset)
        # Whoever looks behind the end of a file that has shrunk is ended: no worker may do that to the server.
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        self._map(tuple(layout), fd)

    @classmethod
    def opened(cls, pools: tuple[Pool, ...], descriptor: int) -> Arena:
        """The arena behind a descriptor that the server has sent, which is the arena's from now on."""
        arena = cls.__new__(cls)
        arena._map(pools, descriptor)
        return arena

    def descriptor(self) -> int:
        """A new descriptor of the memory, the caller's to close."""
        return os.dup(self._fd)

    def _map(self, pools: tuple[Pool, ...], fd: int) -> None:
        self.pools = pools
        self._fd = fd
        self._memory: npt.NDArray[np.uint8] | None = np.frombuffer(mmap.mmap(fd, 0), dtype=np.uint8)

    def slot(self, pool: int, index: int) -> npt.NDArray[np.uint8]:
        """The bytes of slot `index` of pool `pool`: uint8 [slot_bytes], shared memory. Raises IndexError."""
        start = self._start(pool, index)
        return self._bytes(start, start + self.pools[pool].slot_bytes)

    def result(self, pool: int, index: int) -> npt.NDArray[np.uint8]:
        """The place for results of slot `index` of pool `pool`: uint8 [RESULT_BYTES]. Raises IndexError."""
        start = self._start(pool, index) + self.pools[pool].result_offset_bytes
        return self._bytes(start, start + RESULT_BYTES)

    def _start(self, pool: int, index: int) -> int:
        layout = self.pools[pool]
        if not 0 <= index < layout.count:
            raise IndexError(f"pool {pool} has no slot {index}")
        return layout.offset_bytes + index * layout.stride_bytes

    def _bytes(self, start: int, end: int) -> npt.NDArray[np.uint8]:
        if self._memory is None:
            raise ValueError("the arena is closed")
        return self._memory[start:end]

    def close(self) -> None:
        """Give the descriptor back; the memory goes with the last array that still looks at it. Idempotent."""
        if self._memory is not None:
            self._memory = None
            with contextlib.suppress(OSError):
                os.close(self._fd)


Refill = Callable[[int], Awaitable[None]]


class FreeSlots:
    """Which slots of a pool are free. Last freed, first taken: a lightly loaded service touches few pages."""

    def __init__(self, count: int) -> None:
        self._free = list(range(count - 1, -1, -1))
        self._taken: set[int] = set()
        self.files: dict[int, Refill] = {}
        """Slots that hold a file and no pixels, each with what puts pixels there instead, given its number. When that
        raises, it has given the slot back, or will.
        """

    def __len__(self) -> int:
        return len(self._free)

    @property
    def taken(self) -> int:
        """How many are not free."""
        return len(self._taken)

    def files_among(self, slots: Sequence[int]) -> tuple[int, ...]:
        """The positions of those that hold a file."""
        if not self.files:
            return ()
        return tuple([position for position, slot in enumerate(slots) if slot in self.files])

    def take(self) -> int:
        """A free slot's number. Raises IndexError when none is left."""
        index = self._free.pop()
        self._taken.add(index)
        return index

    def give(self, index: int) -> None:
        """Free a taken slot. Raises KeyError for one that is not taken: that would hand one slot to two images."""
        self._taken.remove(index)
        self._free.append(index)
        if self.files:
            self.files.pop(index, None)
