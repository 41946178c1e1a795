"""What a worker is to load, in memory of its own (a memfd): megabytes that must not go through a channel.

Owns: the file's form: data (app.processes.packing), whose arrays lie behind it as they are, so that neither end copies
them while it holds the interpreter's lock. Only the server writes one, and only its workers read it.
"""

from __future__ import annotations

import mmap
import os
import struct

from app.processes.packing import packed, unpacked
from app.worker.messages import Load

_COUNT = struct.Struct("<I")
_LENGTH = struct.Struct("<Q")
_ALIGNMENT_BYTES = 64


def write_load(load: Load) -> int:
    """A descriptor of the file, the caller's to close. May take a moment: not for the event loop. Raises OSError."""
    content, buffers = packed(load)
    parts = [memoryview(content), *buffers]
    descriptor = os.memfd_create("anychip-load", os.MFD_CLOEXEC)
    with os.fdopen(os.dup(descriptor), "wb", buffering=0) as file:
        lengths = b"".join(_LENGTH.pack(len(part)) for part in parts)
        _write(file.fileno(), memoryview(_COUNT.pack(len(parts)) + lengths), 0)
        for part, start in zip(parts, _starts([len(part) for part in parts]), strict=True):
            _write(file.fileno(), part, start)
    return descriptor


def read_load(descriptor: int) -> Load:
    """What was written; closes the descriptor. Arrays are the reader's own to write to, and shared until it does."""
    try:
        file = mmap.mmap(descriptor, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    finally:
        os.close(descriptor)
    memory = memoryview(file)
    (count,) = _COUNT.unpack_from(memory)
    lengths = [_LENGTH.unpack_from(memory, _COUNT.size + number * _LENGTH.size)[0] for number in range(count)]
    content, *buffers = (
        memory[start : start + length] for start, length in zip(_starts(lengths), lengths, strict=True)
    )
    load: Load = unpacked(content, buffers)
    return load


def _starts(lengths: list[int]) -> list[int]:
    starts, end = [], _COUNT.size + len(lengths) * _LENGTH.size
    for length in lengths:
        starts.append(-(-end // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES)
        end = starts[-1] + length
    return starts


def _write(descriptor: int, part: memoryview, start: int) -> None:
    while len(part):
        written = os.pwrite(descriptor, part, start)
        part, start = part[written:], start + written
