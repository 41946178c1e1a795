"""Small images for the tests, encoded, and the header that they are sent with."""

from __future__ import annotations

import io
from typing import Any

from PIL import Image

JPEG = {"Content-Type": "image/jpeg"}  # The service looks at a body's first bytes: these are PNG.


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def turned(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


def png(colour: str = "#808080", size: tuple[int, int] = (64, 64)) -> bytes:
    return encoded(Image.new("RGB", size, colour))


GREY = png()
GREEN, RED, BLUE = png("#00ff00"), png("#ff0000"), png("#0000ff")
