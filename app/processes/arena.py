"""The arena: shared memory that carries pixels to the workers and results back.

    a slot's input: as many bytes as the pool says        its place for results: RESULT_BYTES, in memory of its own

Owns: the memory (memfds, not /dev/shm: containers give that 64 MB), its division into pools of equal slots, and the
free slots. Must not know what is in a slot. The server writes inputs, workers write results; only a slot number is
sent. Pools lie in one memory or in several, each with a second one for results: a process that has one sees nothing of
the others. Decoders have none of those for results.
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

RESULT_BYTES = 256 << 10
"""Place for results in each slot. The system gives memory for the used part; larger results: app.worker.results."""
_ALIGNMENT_BYTES = 4096  # A slot on its own pages never shares a cache line or a page with a neighbour.


@dataclass(frozen=True)
class Pool:
    """Pool of `count` slots of `slot_bytes` bytes, the first at `offset_bytes`, each `stride_bytes` after the last.

    `memory`: number of the arena's memory that it lies in. In the memory for results that belongs to it, the first
    slot's place is at `result_offset_bytes`, and the others follow.
    """

    slot_bytes: int
    count: int
    offset_bytes: int
    stride_bytes: int
    result_offset_bytes: int
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
        result_sizes: dict[int, int] = {}
        for (slot_bytes, count), memory in zip(pools, memories or [0] * len(pools), strict=True):
            if slot_bytes < 1 or count < 1:
                raise ValueError(f"a pool needs slots of at least one byte, not {count} of {slot_bytes}")
            stride = -(-slot_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
            begin, result_begin = sizes.get(memory, 0), result_sizes.get(memory, 0)
            layout.append(Pool(slot_bytes, count, begin, stride, result_begin, memory))
            sizes[memory], result_sizes[memory] = begin + stride * count, result_begin + RESULT_BYTES * count
        every = range(len(sizes))
        wanted = [kind[each] for kind in (sizes, result_sizes) for each in every]
        self._map(tuple(layout), [sealed_memory("anychip-arena", size) for size in wanted])

    @classmethod
    def opened(cls, pools: tuple[Pool, ...], *descriptors: int) -> Arena:
        """Map the arena from its `descriptors`, which the arena owns from now on."""
        arena = cls.__new__(cls)
        arena._map(pools, descriptors)
        return arena

    def descriptors(self, memory: int | None = None, *, results: bool = True) -> list[int]:
        """Return new descriptors of a memory, or of all, and of those for results if wanted; the caller's to close."""
        wanted = range(self._count) if memory is None else [memory]
        kinds = (0, self._count) if results else (0,)
        return [os.dup(self._descriptors[kind + each]) for kind in kinds for each in wanted]

    def pools_in(self, memory: int) -> tuple[Pool, ...]:
        """Return the pools for a process that has this memory alone: pools that lie elsewhere have no slots."""
        return tuple(replace(each, memory=0, count=each.count if each.memory == memory else 0) for each in self.pools)

    def _map(self, pools: tuple[Pool, ...], descriptors: Sequence[int]) -> None:
        self.pools = pools
        # Count of memories; as many for results follow, if they are here.
        self._count = 1 + max(pool.memory for pool in pools)
        self._descriptors = descriptors
        self._memories: Sequence[npt.NDArray[np.uint8]] | None = [
            np.frombuffer(mmap.mmap(each, 0), dtype=np.uint8) for each in descriptors
        ]

    def slot(self, pool: int, index: int) -> npt.NDArray[np.uint8]:
        """Return the bytes of slot `index` of pool `pool`: uint8 [slot_bytes], shared memory. Raises IndexError."""
        layout = self._layout(pool, index)
        start = layout.offset_bytes + index * layout.stride_bytes
        return self._memory(layout.memory)[start : start + layout.slot_bytes]

    def result(self, pool: int, index: int) -> npt.NDArray[np.uint8]:
        """Return the place for results of slot `index` of pool `pool`: uint8 [RESULT_BYTES]. Raises IndexError."""
        layout = self._layout(pool, index)
        start = layout.result_offset_bytes + index * RESULT_BYTES
        return self._memory(self._count + layout.memory)[start : start + RESULT_BYTES]

    def results(self, pool: int) -> npt.NDArray[np.uint8]:
        """Return the places for results of all slots of a pool: uint8 [count, RESULT_BYTES]."""
        layout = self.pools[pool]
        start = layout.result_offset_bytes
        memory = self._memory(self._count + layout.memory)
        return memory[start : start + layout.count * RESULT_BYTES].reshape(layout.count, RESULT_BYTES)

    def _layout(self, pool: int, index: int) -> Pool:
        layout = self.pools[pool]
        if not 0 <= index < layout.count:
            raise IndexError(f"pool {pool} has no slot {index}")
        return layout

    def _memory(self, number: int) -> npt.NDArray[np.uint8]:
        if self._memories is None:
            raise ValueError("the arena is closed")
        return self._memories[number]

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
