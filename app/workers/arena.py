"""The arena: one piece of shared memory in which pixels travel from the server to its workers.

Owns: the memory (a memfd, not /dev/shm: containers give that 64 MB), its division into pools of equal slots, and which
slots are free. Must not know what is in a slot. The server writes, workers read; a slot number is all that is sent.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import numpy.typing as npt

_ALIGNMENT_BYTES = 4096  # A slot on its own pages never shares a cache line or a page with a neighbour.


@dataclass(frozen=True)
class Pool:
    """`count` slots of `slot_bytes` bytes, the first at `offset_bytes`, each `stride_bytes` after the last."""

    slot_bytes: int
    count: int
    offset_bytes: int
    stride_bytes: int


class Arena:
    """Shared memory in pools of slots. A child process is sent the descriptor, and maps the same memory."""

    def __init__(self, pools: Sequence[tuple[int, int]]) -> None:
        """`pools`: (bytes a slot, slots) of each pool. The system gives memory when a slot is first used."""
        layout: list[Pool] = []
        offset = 0
        for slot_bytes, count in pools:
            if slot_bytes < 1 or count < 1:
                raise ValueError(f"a pool needs slots of at least one byte, not {count} of {slot_bytes}")
            stride = -(-slot_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
            layout.append(Pool(slot_bytes, count, offset, stride))
            offset += stride * count
        fd = os.memfd_create("anychip-arena", os.MFD_CLOEXEC)
        os.ftruncate(fd, offset)
        self._map(tuple(layout), fd)

    @classmethod
    def received(cls, pools: tuple[Pool, ...], connection: Connection[Any, Any]) -> Arena:
        """The arena that the other end has sent. Raises EOFError."""
        arena = cls.__new__(cls)
        arena._map(pools, reduction.recv_handle(connection))
        return arena

    def send(self, connection: Connection[Any, Any], pid: int) -> None:
        """To the process at the other end, beside the messages. Raises OSError."""
        reduction.send_handle(connection, self._fd, pid)

    def _map(self, pools: tuple[Pool, ...], fd: int) -> None:
        self.pools = pools
        self._fd = fd
        self._memory: npt.NDArray[np.uint8] | None = np.frombuffer(mmap.mmap(fd, 0), dtype=np.uint8)

    def slot(self, pool: int, index: int) -> npt.NDArray[np.uint8]:
        """The bytes of slot `index` of pool `pool`: uint8 [slot_bytes], shared memory. Raises IndexError."""
        place = self.pools[pool]
        if not 0 <= index < place.count:
            raise IndexError(f"pool {pool} has no slot {index}")
        if self._memory is None:
            raise ValueError("the arena is closed")
        start = place.offset_bytes + index * place.stride_bytes
        return self._memory[start : start + place.slot_bytes]

    def close(self) -> None:
        """Give the descriptor back; the memory goes with the last array that still looks at it. Idempotent."""
        if self._memory is not None:
            self._memory = None
            with contextlib.suppress(OSError):
                os.close(self._fd)


class FreeSlots:
    """Which slots of a pool are free. Last freed, first taken: a lightly loaded service touches few pages."""

    def __init__(self, count: int) -> None:
        self._free = list(range(count - 1, -1, -1))
        self._taken: set[int] = set()

    def __len__(self) -> int:
        return len(self._free)

    def take(self) -> int:
        """A free slot's number. Raises IndexError when none is left."""
        index = self._free.pop()
        self._taken.add(index)
        return index

    def give(self, index: int) -> None:
        """Free a taken slot. Raises KeyError for one that is not taken: that would hand one slot to two images."""
        self._taken.remove(index)
        self._free.append(index)
