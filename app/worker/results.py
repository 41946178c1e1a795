"""Results on their way from a worker to the server: in its message, or in memory of their own.

The arrays of a batch lie one after the other: in Done itself, or, if they are large together, in one memfd that is
sealed against shrinking and sent with Done, up to MAX_LARGE_BYTES. A compromised worker may write anything into this
memory at any time. All that is computed here is checked against its size.
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

MAX_LARGE_BYTES = 1 << 30
SMALL_BYTES = 1 << 16
"""Most bytes of a batch's results that go in the message: the socket takes them at once."""
_ALIGNMENT_BYTES = 16
_KINDS = "biufc"  # Numbers: NumPy would take others for Python objects.


class ResultError(Exception):
    """Failure of results that cannot be sent, or that are not what was announced."""


def write_results(results: Sequence[Arrays]) -> tuple[tuple[Layout, ...], bytes, int, int]:
    """Write the results one after the other. Return the layouts, or one for all if they are the same; the small
    results; and the size and descriptor of large ones (0 and -1: there are none).

    The descriptor is the caller's. Raises ResultError.
    """
    layouts = tuple(
        [None if each is None else tuple([(array.dtype.str, array.shape) for array in each]) for each in results]
    )
    records = [None if layout is None else _record(layout) for layout in layouts]
    if layouts.count(layouts[0]) == len(layouts):
        layouts = layouts[:1]
    size = sum([record.itemsize for record in records if record is not None])
    if size <= SMALL_BYTES:
        small = np.zeros(size, np.uint8)
        _join(zip(results, records, strict=True), small)
        return layouts, small.tobytes(), 0, -1
    if size > MAX_LARGE_BYTES:
        raise ResultError(f"the results of a batch take {size} bytes, and {MAX_LARGE_BYTES} are allowed")
    descriptor = sealed_memory("anychip-results", size)
    try:
        _join(zip(results, records, strict=True), np.frombuffer(mmap.mmap(descriptor, size), dtype=np.uint8))
    except BaseException:
        os.close(descriptor)
        raise
    return layouts, b"", size, descriptor


def read_results(layouts: Sequence[Layout], items: int, memory: Bytes | bytes) -> list[Arrays]:
    """Read the results of so many items, one after the other. Items of a batch may share an array's memory, and may
    write to it. Raises ResultError.
    """
    if len(layouts) not in (1, items):
        raise ResultError(f"{len(layouts)} results came for {items} items")
    writable = bytearray(memory) if isinstance(memory, bytes) else memory
    first = layouts[0]
    if first is not None and len(layouts) == 1:  # The usual case: all at once.
        record = _record(first)
        if record.itemsize * items <= len(writable):
            whole = np.frombuffer(writable, record, items)
            arrays = [whole[name] for name in record.names or ()]
            if arrays and all([array.ndim > 1 for array in arrays]):  # noqa: C419 - faster
                return [*zip(*arrays, strict=True)]
            return [tuple([array[item, ...] for array in arrays]) for item in range(items)]
    results: list[Arrays] = []
    start = 0
    for layout in [first] * items if len(layouts) == 1 else layouts:
        if layout is None:
            results.append(None)
            continue
        record = _record(layout)
        if start + record.itemsize > len(writable):
            raise ResultError(f"a result of {record.itemsize} bytes is missing")
        one = np.frombuffer(writable, record, 1, start)
        start += record.itemsize
        results.append(tuple([one[name][0, ...] for name in record.names or ()]))
    return results


def map_large(descriptor: int, size: int) -> Bytes:
    """Map the memory that came with Done, as copied once it is written here, and close the descriptor.

    Raises ResultError, OSError.
    """
    try:
        if not 0 < size <= MAX_LARGE_BYTES or os.fstat(descriptor).st_size < size:
            raise ResultError(f"{size} bytes of results were announced, and are not there")
        # Reading behind the end of a file that has shrunk would end this process.
        if not fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            raise ResultError("the memory of the results could shrink")
        memory = mmap.mmap(descriptor, size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        return np.frombuffer(memory, dtype=np.uint8)
    finally:
        os.close(descriptor)


def _join(results: Iterable[tuple[Arrays, np.dtype[Any] | None]], memory: Bytes) -> None:
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
        end = -(-(end + math.prod(shape) * dtype.itemsize) // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    if end > MAX_LARGE_BYTES:
        raise ResultError(f"a result of {end} bytes cannot be sent")
    names, size = [str(number) for number in range(len(formats))], max(end, _ALIGNMENT_BYTES)
    return np.dtype({"names": names, "formats": formats, "offsets": offsets, "itemsize": size})
