"""An image on its way through the decoders, the limits on all of them, and what can become of one.

Owns: plain data and errors. Must not know processes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from app.decoder.messages import Kind
from models import Placement

Encoded = bytes | bytearray | memoryview


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


Outcome = Placement | Exception
"""Where the pixels of an image lie in its slot, or why they are not there."""


@dataclass(eq=False, slots=True)
class PendingImage:
    """An image on its way through the decoders. The least `rank_s` goes first (`time.monotonic()`).

    Its slot belongs to the decoders until `ended` is called, exactly once: then no decoder can write to it any more.
    Of REGIONS, `tail` names them with their slots (`messages.pack_regions`), and these are filled; of these `width` is
    the number, of PIXELS (uint8 [height, width, 3]) `width` and `height` are the size.
    """

    model: int
    rank_s: float
    body: Encoded
    ended: Callable[[PendingImage, Outcome], None] = lambda _image, _outcome: None
    kind: Kind = Kind.ENCODED
    slot: int = 0
    width: int = 0
    height: int = 0
    tail: bytes = b""
    wanted: int = 1
    """How many still wait for it."""
    pixels: int = 0
    large: bool = False
    """It may run only where a large one may."""
    queued: bool = False
    """It waits for a decoder."""
    deaths: int = 0
    """Of decoders that had it; from the first on it is its decoder's only image."""
    sent_s: float = 0.0
