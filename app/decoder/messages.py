"""What the server and its decoders say to each other: fixed layouts, no pickles.

Owns: the layout of a job and of its answer. Many of either travel in one packet of a SOCK_SEQPACKET socket, which keeps
packets whole. Must not know processes. A decoder is not trusted: its answers are numbers with bounds and a sentence.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

from models.contract.cascade import Region

if TYPE_CHECKING:
    from app.logs import Style
    from app.processes.arena import Pool
    from models import PixelModel

PACKET_BYTES = 1 << 16
"""More than all answers that a decoder can owe."""

MAX_TEXT_BYTES = 300
_MAX_LINE_BYTES = 4096


class Kind(IntEnum):
    """What lies in the buffer."""

    ENCODED = 0
    """An image file."""
    PIXELS = 1
    """uint8 [height, width, 3], to be placed as a decoded image would be."""

    REGIONS = 2
    """An image file, and after it the regions that are to be placed, each into a slot of its own."""


class Status(IntEnum):
    """What became of an image."""

    PLACED = 0
    INVALID = 1
    """Not an image, broken, or of a kind that is not read; the text says so to the client."""
    TOO_LARGE = 2
    """More pixels than an image may have."""
    LARGE = 3
    """Not decoded, as it is a large one and the job did not allow that; `width` and `height` are its size."""
    FAILED = 4
    """The decoder's own fault; the text is for the log."""
    SAID = 5
    """No answer: the text is for the log."""


class Job(NamedTuple):
    """One image. `buffer`: which part of the inbox holds its `size` bytes; `model`, `slot`: where its pixels go.

    `max_pixels`: beyond it the image is refused; `large_pixels`: from it on the image is large. `width` and `height`
    are those of PIXELS.
    """

    token: int
    kind: int
    buffer: int
    model: int
    slot: int
    size: int
    max_pixels: int
    large_pixels: int
    width: int
    height: int


_REGION = struct.Struct("<IIIIIB8f")
_UPRIGHT = (0.0,) * 8
MAX_REGIONS = 4096
"""Of an image in one job."""
REGIONS_BYTES = MAX_REGIONS * _REGION.size


def pack_regions(slots: Iterable[int], regions: Iterable[Region]) -> bytes:
    """What follows an image of which several regions are placed; the job's `width` is their number."""
    packed = []
    for slot, region in zip(slots, regions, strict=True):
        *place, corners = region
        packed.append(_REGION.pack(slot, *place, *(corners or _UPRIGHT)))
    return b"".join(packed)


def split_regions(data: memoryview, count: int) -> tuple[memoryview, list[tuple[int, Region]]]:
    """The image, and its regions with their slots."""
    end = len(data) - count * _REGION.size
    found = []
    for slot, x, y, width, height, quarters, *corners in _REGION.iter_unpack(data[end:]):
        found.append((slot, Region(x, y, width, height, quarters, tuple(corners) if any(corners) else ())))
    return data[:end], found


_JOB = struct.Struct("<IBBHIQQQII")
_ANSWER = struct.Struct("<IBIIdddH")


def pack_job(job: Job) -> bytes:
    """A job as bytes; joined with others they make a packet."""
    return _JOB.pack(*job)


def jobs_in(packet: bytes) -> Iterator[Job]:
    """The jobs of a packet."""
    return map(Job._make, _JOB.iter_unpack(packet))


@dataclass(frozen=True, slots=True)
class Decoded:
    """What became of the job `token`. `scale`, `pad_x`, `pad_y`: the placement; `width`, `height`: as displayed."""

    token: int
    status: Status
    width: int = 0
    height: int = 0
    scale: float = 1.0
    pad_x: float = 0.0
    pad_y: float = 0.0
    text: str = ""


def pack_answer(answer: Decoded) -> bytes:
    """An answer as bytes; joined with others they make a packet."""
    text = answer.text.encode()[: _most_bytes(answer.status)]
    numbers = answer.width, answer.height, answer.scale, answer.pad_x, answer.pad_y
    return _ANSWER.pack(answer.token, answer.status, *numbers, len(text)) + text


def _most_bytes(status: int) -> int:
    return _MAX_LINE_BYTES if status == Status.SAID else MAX_TEXT_BYTES


def answers_in(packet: bytes) -> Iterator[Decoded]:
    """The answers of a packet. Raises ValueError for one that no decoder of ours writes."""
    at = 0
    while at < len(packet):
        try:
            token, status, width, height, scale, pad_x, pad_y, length = _ANSWER.unpack_from(packet, at)
        except struct.error as error:
            raise ValueError(f"an answer is cut short: {error}") from None
        at += _ANSWER.size
        text = packet[at : at + length]
        if len(text) < length or length > _most_bytes(status):
            raise ValueError("an answer's text is longer than it may be")
        at += length
        yield Decoded(token, Status(status), width, height, scale, pad_x, pad_y, text.decode(errors="replace"))


@dataclass(frozen=True)
class DecodePlan:
    """What every decoder needs to know: written by the server (app.processes.packing).

    `models`: the geometry of each model by its number, None where it takes no images; `pools`: the arena's layout;
    `memory_bytes`: how much one image may take to decode.
    """

    models: tuple[PixelModel | None, ...]
    pools: tuple[Pool, ...]
    buffers: int
    buffer_bytes: int
    log_style: Style
    memory_bytes: int = 4 << 30
