"""Shared memory: the arena, whose slots carry pixels to the workers, and blocks for what ingresses send the owner.

It lies in memfds, not in /dev/shm: containers give that 64 MB. The server and its decoders write the arena, workers
read; only a slot number is sent. Pools lie in one memory or in several: a process that has one sees nothing of others.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from app.processes.channel import close_all

_ALIGNMENT_BYTES = 4096  # A slot on its own pages never shares a cache line or a page with a neighbour.
_LEAST_BITS, _KEPT_BITS = 12, 20
"""Bits of a block's size: the least, and the most that stays with the process once it is free."""
_KEPT_BYTES = 16 << 20
"""Most bytes of free blocks that stay with the process: the next requests find them in the cache."""
ROOM = 40
"""Ratio of the memory to the bytes in use at once: a block is up to twice as large as its content, no block serves
another size, and there are 20 sizes. The system gives memory only for what is touched.
"""

Pool: TypeAlias = tuple[int, int]
"""Bytes of a slot, and number of slots; none: the pool lies in a memory that this process has not."""


class Arena:
    """Shared memory in pools of slots. A child process gets descriptors, and maps the same memory."""

    def __init__(self, pools: Sequence[Pool], memories: Sequence[int] | None = None) -> None:
        """Make the pools. The system gives memory when a slot is first used.

        `memories`: which memory each pool lies in, from 0; None: all in one.
        """
        for slot_bytes, count in pools:
            if slot_bytes < 1 or count < 1:
                raise ValueError(f"a pool needs slots of at least one byte, not {count} of {slot_bytes}")
        memories = memories or [0] * len(pools)
        sizes = [0] * (max(memories) + 1)
        for (slot_bytes, count), memory in zip(pools, memories, strict=True):
            sizes[memory] += _stride(slot_bytes) * count
        self._map(pools, memories, [sealed_memory("anychip-arena", size) for size in sizes])

    @classmethod
    def opened(cls, pools: Sequence[Pool], *descriptors: int, memories: Sequence[int] = ()) -> Arena:
        """Map the arena from its `descriptors`, which the arena owns from now on."""
        arena = cls.__new__(cls)
        arena._map(pools, memories or [0] * len(pools), descriptors)
        return arena

    def descriptors(self, memory: int | None = None) -> list[int]:
        """Return new descriptors of a memory, or of all; the caller's to close."""
        wanted = self._descriptors if memory is None else [self._descriptors[memory]]
        return [os.dup(each) for each in wanted]

    def pools_in(self, memory: int) -> tuple[Pool, ...]:
        """Return the pools for a process that has this memory alone: pools that lie elsewhere have no slots."""
        return tuple(
            (slot_bytes, count if own == memory else 0)
            for (slot_bytes, count), own in zip(self.pools, self.memories, strict=True)
        )

    def _map(self, pools: Sequence[Pool], memories: Sequence[int], descriptors: Sequence[int]) -> None:
        self.pools, self.memories, self._descriptors = tuple(pools), tuple(memories), descriptors
        self._slots: list[npt.NDArray[np.uint8]] | None = []
        """The slots of each pool: uint8 [count, slot_bytes]."""
        mapped = [np.frombuffer(mmap.mmap(each, 0), dtype=np.uint8) for each in descriptors]
        ends = [0] * len(mapped)
        for (slot_bytes, count), memory in zip(pools, memories, strict=True):
            start, stride = ends[memory], _stride(slot_bytes)
            ends[memory] += stride * count
            self._slots.append(mapped[memory][start : ends[memory]].reshape(count, stride)[:, :slot_bytes])

    def slot(self, pool: int, index: int) -> npt.NDArray[np.uint8]:
        """Return the bytes of slot `index` of pool `pool`: uint8 [slot_bytes], shared memory. Raises IndexError."""
        if self._slots is None:
            raise ValueError("the arena is closed")
        if index < 0:
            raise IndexError(f"there is no slot {index}")
        slot: npt.NDArray[np.uint8] = self._slots[pool][index]
        return slot

    def close(self) -> None:
        """Close the descriptors; the memory goes with the last array that uses it. Idempotent."""
        if self._slots is not None:
            self._slots = None
            close_all(self._descriptors)


def _stride(slot_bytes: int) -> int:
    return -(-slot_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def sealed_memory(name: str, size: int) -> int:
    """Make memory of a fixed size and return its descriptor. Raises OSError.

    A process that reads behind the end of a file that has shrunk is ended: no worker may do that to the server. And no
    limit of a decoder would count what is written behind the end of a file that has grown.
    """
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, size)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return descriptor


class FreeSlots:
    """The free slots of a pool. Last freed, first taken: a lightly loaded service touches few pages."""

    def __init__(self, count: int) -> None:
        self._free = list(range(count - 1, -1, -1))
        self._taken: set[int] = set()

    @property
    def taken(self) -> int:
        """Count of the slots that are not free."""
        return len(self._taken)

    def take(self) -> int:
        """Take a free slot and return its number. Raises IndexError if none is left."""
        index = self._free.pop()
        self._taken.add(index)
        return index

    def give(self, index: int) -> None:
        """Free a taken slot. Raises KeyError for one that is not taken: that would hand one slot to two images."""
        self._taken.remove(index)
        self._free.append(index)


class Blocks:
    """Blocks, made by the process that writes. Not more than `size_bytes / ROOM` may be in use at once."""

    def __init__(self, size_bytes: int) -> None:
        self.descriptor = sealed_memory("anychip-blocks", size_bytes)
        self._memory = mmap.mmap(self.descriptor, size_bytes)
        self._view = memoryview(self._memory)
        self._end = 0
        self._free: dict[int, list[int]] = {}  # Free blocks that keep their memory.
        self._empty: dict[int, list[int]] = {}  # Free blocks whose memory the system has back.
        self._kept = 0

    def write(self, data: bytes | bytearray | memoryview) -> int:
        """Put `data` into a block; return where the block begins. Raises MemoryError."""
        bits = _bits(len(data))
        if free := self._free.get(bits):
            start = free.pop()  # Last freed, first taken: it is in the cache.
            self._kept -= 1 << bits
        elif empty := self._empty.get(bits):
            start = empty.pop()
        elif self._end + (1 << bits) <= len(self._view):
            start, self._end = self._end, self._end + (1 << bits)
        else:
            raise MemoryError
        self._view[start : start + len(data)] = data
        return start

    def give(self, start: int, size: int) -> None:
        """Free the block of `size` bytes at `start`: no process reads it any more."""
        bits = _bits(size)
        if bits <= _KEPT_BITS and self._kept + (1 << bits) <= _KEPT_BYTES:
            self._free.setdefault(bits, []).append(start)
            self._kept += 1 << bits
        else:
            self._empty.setdefault(bits, []).append(start)
            self._memory.madvise(mmap.MADV_REMOVE, start, 1 << bits)


def _bits(size: int) -> int:
    return max(_LEAST_BITS, (size - 1).bit_length())


def open_blocks(descriptor: int) -> memoryview:
    """Map all of the memory for a reader and close the descriptor. Raises OSError, ValueError."""
    try:
        return memoryview(mmap.mmap(descriptor, 0, prot=mmap.PROT_READ))
    finally:
        os.close(descriptor)
