"""An image on its way through the decoders, the limits on all of them, and what can become of one.

Owns: plain data and errors. Must not know processes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from app.decoder.messages import Kind
from models import Placement

Encoded = bytes | bytearray | memoryview


class DecodeExpiredError(Exception):
    """The deadline has passed before the image was decoded."""


class DecodeFailedError(Exception):
    """The image could not be decoded for a reason that lies here; the message is for the log."""


@dataclass(frozen=True, slots=True)
class ImageLimits:
    """`queue`: images that may wait or be decoded; `max_pixels`: of one image. From `large_pixels` on an image is a
    large one. These leave a decoder free, and have together no more pixels than every decoder with one of that size:
    256 MB a decoder, at the 16 bytes a pixel that the hungriest format (WebP) takes while it is decoded. `timeout_s`:
    after it a decoder that works on an image counts as hung.

    The default lies above what phones and cameras commonly send (12 million): of those every decoder may take one.
    """

    queue: int
    max_pixels: int
    large_pixels: int = 16_000_000
    timeout_s: float = 10.0


@dataclass(eq=False, slots=True)
class PendingImage:
    """An image on its way. `deaths`: of decoders that had it; from the first on it is its decoder's only image."""

    kind: Kind
    body: Encoded
    slot: int
    width: int
    height: int
    deadline_s: float
    give: Callable[[int], None]
    future: asyncio.Future[Placement]
    tail: bytes = b""
    """What follows the body in a decoder's buffer: the regions of an image."""
    passed: Callable[[], None] | None = None
    """Is told where the file itself was put into the slot; None: it is to be decoded."""
    pixels: int = 0
    deaths: int = 0
    abandoned: bool = False
    sent_s: float = 0.0
