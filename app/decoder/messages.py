"""Messages between the server and its decoders, and the memory in which a decoder finds its images.

Owns: jobs, answers, and that memory: a page of state, and buffers of bytes. The server writes into a free buffer and
names it in a job. The decoder writes its current job into the first page, so that the server knows the culprit if the
decoder dies. Many jobs, or answers, travel in one packet (app.processes.channel.to_packet) of a SOCK_SEQPACKET socket,
which keeps packets whole. Must not know processes. A decoder is not trusted: its answers are numbers with bounds and a
sentence.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Annotated

import msgspec

from app.core import Count
from app.processes.arena import sealed_memory

if TYPE_CHECKING:
    from app.logs import Style
    from app.processes.arena import Pool
    from models import PixelModel

PACKET_BYTES = 1 << 16
"""Size of a packet: more than all answers that a decoder can owe."""

MAX_TEXT = 300


class Kind(IntEnum):
    """Kind of content in a buffer."""

    ENCODED = 0
    PIXELS = 1
    """Pixels: uint8 [height, width, 3], to be placed as a decoded image would be."""

    REGIONS = 2
    """Image file followed by its regions, each to be placed into a slot of its own."""


class Status(IntEnum):
    """Outcome of a job."""

    PLACED = 0
    INVALID = 1
    """Not an image, broken, or of a kind that is not read; the text is for the client."""
    TOO_LARGE = 2
    """More pixels than the limit."""
    LARGE = 3
    """Not decoded: a large image, which the job did not allow; `width` and `height` are its size."""
    FAILED = 4
    """Decoder's own fault; the text is for the log."""


class Job(msgspec.Struct, frozen=True, array_like=True):
    """One image. `buffer`: the part of the inbox with its `size` bytes, of which the last `tail` are its REGIONS: a
    packet of slots, each with its region; `model`, `slot`: the target of its pixels.

    `max_pixels`: above it the image is refused; `large_pixels`: from it on the image is large. `width` and `height` are
    the size of PIXELS.
    """

    token: int
    kind: Kind
    buffer: int
    model: int
    slot: int
    size: int
    max_pixels: int
    large_pixels: int
    width: int = 0
    height: int = 0
    tail: int = 0


MAX_REGIONS = 4096
REGIONS_BYTES = MAX_REGIONS * 112


class Decoded(msgspec.Struct, frozen=True, array_like=True):
    """Result of the job `token`. `scale`, `pad_x`, `pad_y`: the placement; `width`, `height`: as displayed."""

    token: Count
    status: Status
    width: Count = 0
    height: Count = 0
    scale: float = 1.0
    pad_x: float = 0.0
    pad_y: float = 0.0
    text: Annotated[str, msgspec.Meta(max_length=MAX_TEXT)] = ""


@dataclass(frozen=True)
class DecodePlan:
    """Plan for every decoder, written by the server (app.processes.packing).

    `models`: the geometry of each model by its number, None if it takes no images; `pools` and `memories`: the
    arena's; `memory_bytes`: memory that one image may take to decode.
    """

    models: tuple[PixelModel | None, ...]
    pools: tuple[Pool, ...]
    buffers: int
    buffer_bytes: int
    log_style: Style
    memory_bytes: int = 4 << 30
    memories: tuple[int, ...] = ()


_STATE_BYTES = 4096
KEPT_BYTES = 1 << 20
"""Bytes of a buffer that keep their memory after use; the rest goes back to the system."""


class Inbox:
    """Shared memory (memfd) of one decoder. The system gives memory when a buffer is first used."""

    def __init__(self, buffers: int, buffer_bytes: int, descriptor: int | None = None) -> None:
        """Make an inbox, or map the one of `descriptor`, made by another process; that stays the caller's."""
        self.buffer_bytes = -(-buffer_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._own = descriptor is None
        size = _STATE_BYTES + buffers * self.buffer_bytes
        self.descriptor = sealed_memory("anychip-inbox", size) if descriptor is None else descriptor
        self._memory = mmap.mmap(self.descriptor, size)
        self._view = memoryview(self._memory)
        self._working_on = self._view[:4].cast("I")

    @property
    def working_on(self) -> int:
        """Return the job that the decoder says it has begun and not ended, -1 if there is none."""
        return self._working_on[0] - 1

    def begin(self, token: int) -> None:
        """Note, in the decoder, that work on this job begins."""
        self._working_on[0] = token + 1

    def end(self) -> None:
        """Note, in the decoder, that it works on no job."""
        self._working_on[0] = 0

    def write(self, buffer: int, data: bytes | bytearray | memoryview, tail: bytes = b"") -> None:
        """Copy an image's bytes into a buffer, which has room for them, and `tail` after them."""
        start = _STATE_BYTES + buffer * self.buffer_bytes
        end = start + len(data)
        self._view[start:end] = data
        self._view[end : end + len(tail)] = tail

    def buffer(self, buffer: int, size: int) -> memoryview:
        """Return the first `size` bytes of a buffer."""
        start = _STATE_BYTES + buffer * self.buffer_bytes
        return self._view[start : start + min(size, self.buffer_bytes)]

    def trim(self, buffer: int, used: int) -> None:
        """Give the memory of a large image in a buffer back; `used`: its size in bytes, more than KEPT_BYTES."""
        start = _STATE_BYTES + buffer * self.buffer_bytes + KEPT_BYTES
        length = -(-(used - KEPT_BYTES) // mmap.PAGESIZE) * mmap.PAGESIZE
        self._memory.madvise(mmap.MADV_REMOVE, start, min(length, self.buffer_bytes - KEPT_BYTES))

    def close(self) -> None:
        """Give the descriptor back; the memory goes with it. Idempotent."""
        if self._own:
            self._own = False
            self._working_on.release()
            self._view.release()
            self._memory.close()
            os.close(self.descriptor)
