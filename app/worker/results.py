"""Results on their way from a worker to the server: in its message, in the arena beside their input, or in own memory.

Owns: where the arrays of a batch lie, at both ends. Must not know what they mean.

Results of a batch that are small together are in Done itself: memory that another processor has just written costs more
to read. Else each item's arrays lie one after the other in its slot's place for results (arena.RESULT_BYTES). Results
that do not fit there go, for the whole batch, into one memfd that is sealed against shrinking and sent with Done, up to
MAX_OVERFLOW_BYTES. A compromised worker may write anything into this memory at any time. All that is computed here is
checked against its size, and arrays in the arena are copied before they are used.
"""

from __future__ import annotations

import fcntl
import math
import mmap
import os
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from app.processes.arena import sealed_memory
from app.worker.messages import ArrayLayout

Array: TypeAlias = npt.NDArray[Any]
Bytes: TypeAlias = npt.NDArray[np.uint8]
Arrays: TypeAlias = tuple[Array, ...] | None
"""Arrays that `Model.reduce` returned for one item; None if the network computed NaN or infinity."""
Layout: TypeAlias = tuple[ArrayLayout, ...] | None

MAX_OVERFLOW_BYTES = 1 << 30
SMALL_BYTES = 4096
"""Most bytes of a batch's results that go in the message."""
_ALIGNMENT_BYTES = 16
_KINDS = "biufc"  # Numbers: NumPy would take others for Python objects.


class ResultError(Exception):
    """Failure of results that cannot be sent, or that are not what was announced."""


def write_results(results: Sequence[Arrays], places: Iterable[Bytes]) -> tuple[tuple[Layout, ...], bytes, int, int]:
    """Write each result to its place, unless they are small. Return the layouts, or one for all if they are the same,
    the small results, and the overflow's size and descriptor (0 and -1: there is none).

    The descriptor is the caller's. Raises ResultError.
    """
    layouts = tuple(
        [None if each is None else tuple([(array.dtype.str, array.shape) for array in each]) for each in results]
    )
    records = [None if layout is None else _record(layout) for layout in layouts]
    if layouts.count(layouts[0]) == len(layouts):
        layouts = layouts[:1]
    small_bytes = sum([record.itemsize for record in records if record is not None])
    if small_bytes <= SMALL_BYTES:
        small = np.zeros(small_bytes, np.uint8)
        _join(zip(results, records, strict=True), small)
        return layouts, small.tobytes(), 0, -1
    large: list[tuple[Arrays, np.dtype[Any] | None]] = []
    overflow_bytes = 0
    for result, record, place in zip(results, records, places, strict=True):
        if record is not None and record.itemsize > len(place):
            large.append((result, record))
            overflow_bytes += record.itemsize
        else:
            _join([(result, record)], place)
    if not large:
        return layouts, b"", 0, -1
    if overflow_bytes > MAX_OVERFLOW_BYTES:
        raise ResultError(f"the results of a batch take {overflow_bytes} bytes, and {MAX_OVERFLOW_BYTES} are allowed")
    descriptor = sealed_memory("anychip-results", overflow_bytes)
    try:
        _join(large, np.frombuffer(mmap.mmap(descriptor, overflow_bytes), dtype=np.uint8))
    except BaseException:
        os.close(descriptor)
        raise
    return layouts, b"", overflow_bytes, descriptor


def read_results(
    layouts: Sequence[Layout], places: Bytes | None, slots: Sequence[int], others: Bytes | bytes | None
) -> list[Arrays]:
    """Read the results of these slots from the places (uint8 [place, bytes]), or else from `others`: the small results,
    without places, or the overflow.

    Arrays from places and small results are copies, which items of a batch may share; those from the overflow are
    views. Raises ResultError.
    """
    if len(layouts) not in (1, len(slots)):
        raise ResultError(f"{len(layouts)} results came for {len(slots)} items")
    memory = bytearray(others) if isinstance(others, bytes) else others  # A task may write to its arrays.
    first = layouts[0]
    if first is not None and len(layouts) == 1:  # The usual case: all at once.
        record, whole = _record(first), None
        if places is not None and record.itemsize <= places.shape[1]:
            whole = places[list(slots), : record.itemsize].view(record)[:, 0]
        elif memory is not None and record.itemsize * len(slots) <= len(memory):
            whole = np.frombuffer(memory, record, len(slots))
        if whole is not None:
            arrays = [whole[name] for name in record.names or ()]
            if arrays and all([array.ndim > 1 for array in arrays]):  # noqa: C419 - faster
                return [*zip(*arrays, strict=True)]
            return [tuple([array[item, ...] for array in arrays]) for item in range(len(slots))]
    results: list[Arrays] = []
    start = 0
    for layout, slot in zip(layouts if len(layouts) > 1 else [first] * len(slots), slots, strict=True):
        if layout is None:
            results.append(None)
            continue
        record = _record(layout)
        if places is not None and record.itemsize <= places.shape[1]:
            one = np.frombuffer(bytearray(places[slot, : record.itemsize]), record)
        elif memory is not None and start + record.itemsize <= len(memory):
            one = np.frombuffer(memory, record, 1, start)
            start += record.itemsize
        else:
            raise ResultError(f"a result of {record.itemsize} bytes is missing")
        results.append(tuple([one[name][0, ...] for name in record.names or ()]))
    return results


def map_overflow(descriptor: int, size: int) -> Bytes:
    """Map the memory that came with Done, read-only, and close the descriptor. Raises ResultError, OSError."""
    try:
        if not 0 < size <= MAX_OVERFLOW_BYTES or os.fstat(descriptor).st_size < size:
            raise ResultError(f"{size} bytes of results were announced, and are not there")
        # Reading behind the end of a file that has shrunk would end this process.
        if not fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            raise ResultError("the memory of the results could shrink")
        return np.frombuffer(mmap.mmap(descriptor, size, prot=mmap.PROT_READ), dtype=np.uint8)
    finally:
        os.close(descriptor)


def _join(results: Iterable[tuple[Arrays, np.dtype[Any] | None]], memory: Bytes) -> None:
    """Write results one after the other, each in its record's form."""
    start = 0
    for result, record in results:
        if result is not None and record is not None:
            one = memory[start : start + record.itemsize].view(record)
            for name, array in zip(record.names or (), result, strict=True):
                one[name][0, ...] = array
            start += record.itemsize


@lru_cache(maxsize=512)
def _record(layout: tuple[ArrayLayout, ...]) -> np.dtype[Any]:
    """Return the type of a record whose fields are the arrays, one after the other. Raises ResultError."""
    formats, offsets, end = [], [], 0
    for name, shape in layout:
        try:
            dtype = np.dtype(name)
        except (TypeError, ValueError) as error:
            raise ResultError(f"there is no type {name!r}") from error
        if dtype.kind not in _KINDS or dtype.names is not None or any(length < 0 for length in shape):
            raise ResultError(f"an array of {name!r} {shape} cannot be sent")
        formats.append((dtype, shape))
        offsets.append(end)
        end = _aligned(end + math.prod(shape) * dtype.itemsize)
    if end > MAX_OVERFLOW_BYTES:
        raise ResultError(f"a result of {end} bytes cannot be sent")
    names, size = [str(number) for number in range(len(formats))], max(end, _ALIGNMENT_BYTES)
    return np.dtype({"names": names, "formats": formats, "offsets": offsets, "itemsize": size})


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
