"""The arena: shared memory that carries pixels to the workers.

Owns: the memory (memfds, not /dev/shm: containers give that 64 MB), its division into pools of equal slots, and the
free slots. Must not know what is in a slot. The server and its decoders write, workers read; only a slot number is
sent. Pools lie in one memory or in several: a process that has one sees nothing of the others.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

_ALIGNMENT_BYTES = 4096  # A slot on its own pages never shares a cache line or a page with a neighbour.


@dataclass(frozen=True)
class Pool:
    """Pool of `count` slots of `slot_bytes` bytes, the first at `offset_bytes`, each `stride_bytes` after the last.

    `memory`: number of the arena's memory that it lies in.
    """

    slot_bytes: int
    count: int
    offset_bytes: int
    stride_bytes: int
    memory: int = 0


class Arena:
    """Shared memory in pools of slots. A child process gets descriptors, and maps the same memory."""

    def __init__(self, pools: Sequence[tuple[int, int]], memories: Sequence[int] | None = None) -> None:
        """Make the pools. `pools`: (bytes a slot, slots) of each. The system gives memory when a slot is first used.

        `memories`: which memory each pool lies in, from 0; None: all in one. A process that has one sees nothing of the
        others.
        """
        layout: list[Pool] = []
        sizes: dict[int, int] = {}
        for (slot_bytes, count), memory in zip(pools, memories or [0] * len(pools), strict=True):
            if slot_bytes < 1 or count < 1:
                raise ValueError(f"a pool needs slots of at least one byte, not {count} of {slot_bytes}")
            stride = -(-slot_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
            begin = sizes.get(memory, 0)
            layout.append(Pool(slot_bytes, count, begin, stride, memory))
            sizes[memory] = begin + stride * count
        self._map(tuple(layout), [sealed_memory("anychip-arena", sizes[each]) for each in range(len(sizes))])

    @classmethod
    def opened(cls, pools: tuple[Pool, ...], *descriptors: int) -> Arena:
        """Map the arena from its `descriptors`, which the arena owns from now on."""
        arena = cls.__new__(cls)
        arena._map(pools, descriptors)
        return arena

    def descriptors(self, memory: int | None = None) -> list[int]:
        """Return new descriptors of a memory, or of all; the caller's to close."""
        wanted = self._descriptors if memory is None else [self._descriptors[memory]]
        return [os.dup(each) for each in wanted]

    def pools_in(self, memory: int) -> tuple[Pool, ...]:
        """Return the pools for a process that has this memory alone: pools that lie elsewhere have no slots."""
        return tuple(replace(each, memory=0, count=each.count if each.memory == memory else 0) for each in self.pools)

    def _map(self, pools: tuple[Pool, ...], descriptors: Sequence[int]) -> None:
        self.pools = pools
        self._descriptors = descriptors
        self._memories: Sequence[npt.NDArray[np.uint8]] | None = [
            np.frombuffer(mmap.mmap(each, 0), dtype=np.uint8) for each in descriptors
        ]

    def slot(self, pool: int, index: int) -> npt.NDArray[np.uint8]:
        """Return the bytes of slot `index` of pool `pool`: uint8 [slot_bytes], shared memory. Raises IndexError."""
        layout = self.pools[pool]
        if not 0 <= index < layout.count:
            raise IndexError(f"pool {pool} has no slot {index}")
        if self._memories is None:
            raise ValueError("the arena is closed")
        start = layout.offset_bytes + index * layout.stride_bytes
        return self._memories[layout.memory][start : start + layout.slot_bytes]

    def close(self) -> None:
        """Close the descriptors; the memory goes with the last array that uses it. Idempotent."""
        if self._memories is not None:
            self._memories = None
            for each in self._descriptors:
                with contextlib.suppress(OSError):
                    os.close(each)


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

    def __len__(self) -> int:
        return len(self._free)

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
