"""Small images for the tests, encoded, and the header that they are sent with; and how files and masks are read."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
from PIL import Image

from app.images.header import InvalidImageError, plain_header, read_file, read_header, write_file

JPEG = {"Content-Type": "image/jpeg"}  # The service looks at a body's first bytes: these are PNG.


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def passes(file: bytes) -> bool:
    """Whether a file may pass to a device; what the event loop reads of it and what the worker does has to agree."""
    plain = plain_header(memoryview(file), 1 << 20)
    if plain is None:
        return False
    assert plain[0] == read_header(file)
    slot = np.zeros(1 << 20, np.uint8)
    write_file(slot, memoryview(file), *plain)
    try:
        found = read_file(slot)
    except InvalidImageError:
        return False
    slot[:] = 0  # It is a copy: decoders may still write to the slot.
    assert found.data.tobytes() == file
    return True


def whole_mask(found: dict[str, Any]) -> Any:
    """Expand an answer's PNG of a part to a mask of the whole image: bool [height, width]."""
    mask = np.zeros(found["size"], bool)
    part = np.asarray(Image.open(io.BytesIO(base64.b64decode(found["png"]))))
    mask[found["y"] : found["y"] + part.shape[0], found["x"] : found["x"] + part.shape[1]] = part > 0
    return mask


def turned(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


def png(colour: str = "#808080", size: tuple[int, int] = (64, 64)) -> bytes:
    return encoded(Image.new("RGB", size, colour))


GREY = png()
GREEN, RED, BLUE = png("#00ff00"), png("#ff0000"), png("#0000ff")
