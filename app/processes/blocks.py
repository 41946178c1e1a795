"""Blocks of shared memory in which an ingress of another process puts its requests' bytes, for the owner to read.

Owns: the free blocks. Must not know what is in one.
"""

from __future__ import annotations

import mmap
import os

from app.processes.arena import sealed_memory

_LEAST_BITS, _KEPT_BITS = 12, 20
"""Bits of a block's size: the least, and the most that stays with the process once it is free."""
_KEPT_BYTES = 16 << 20
"""Most bytes of free blocks that stay with the process: the next requests find them in the cache."""
ROOM = 40
"""Ratio of the memory to the bytes in use at once: a block is up to twice as large as its content, no block serves
another size, and there are 20 sizes. The system gives memory only for what is touched.
"""


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


def opened(descriptor: int) -> memoryview:
    """Map all of the memory for a reader and close the descriptor. Raises OSError, ValueError."""
    try:
        return memoryview(mmap.mmap(descriptor, 0, prot=mmap.PROT_READ))
    finally:
        os.close(descriptor)
