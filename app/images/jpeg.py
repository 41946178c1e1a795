"""A JPEG at its full size, by the fastest library that is here and works.

Owns: the order of libraries, and finding out which of them can be used. Must not know what a JPEG's header says.

All of them end in libjpeg-turbo with its exact transform, so their pixels are the same to the bit; a reader counts only
if it decodes a sample as Pillow does, at each scale it offers, and says that a file cut short is one. simplejpeg brings
a libjpeg-turbo of its own and is the fastest (docs/decoding.md); there are no builds of it for some processors.
torchvision's operator is called directly: since 0.29 its Python wrapper warns at every call, as image decoding is
announced to leave torchvision; OpenCV then takes its place. torchcodec wants FFmpeg and a newer torch than vendors'.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import cache

import cv2
import numpy as np
import numpy.typing as npt
import torch
from PIL import Image

from models.vision import torchvision

Encoded = bytes | bytearray | memoryview
Pixels = npt.NDArray[np.uint8]
Read = Callable[[Encoded, int], Pixels | None]
"""Decodes at a whole, half, quarter or eighth (1, 2, 4, 8), sides rounded up: uint8 [height, width, 3] as stored. None
where it cannot or will not. May raise anything at a broken file."""


def by_simplejpeg(data: Encoded, reduction: int) -> Pixels | None:
    """simplejpeg; what it finds wrong it does not read, as it cannot tell damage from an early end."""
    import simplejpeg

    try:
        height, width, colours, _ = simplejpeg.decode_jpeg_header(data)
        if colours in ("CMYK", "YCCK"):  # These it turns into three colours in a way of its own.
            return None
        least = {} if reduction == 1 else {"min_height": -(-height // reduction), "min_width": -(-width // reduction)}
        return np.asarray(simplejpeg.decode_jpeg(data, "RGB", **least))
    except ValueError:
        return None


def by_torchvision(data: Encoded, reduction: int) -> Pixels | None:
    """The operator behind torchvision.io.decode_jpeg; some builds come without libjpeg."""
    if reduction > 1:
        return None
    writable = data if isinstance(data, bytearray) or not memoryview(data).readonly else bytearray(data)
    encoded = torch.frombuffer(writable, dtype=torch.uint8)  # It would not write, but asks for memory that it could.
    pixels = torch.ops.image.decode_jpeg(encoded, torchvision.io.ImageReadMode.RGB.value, False)
    return np.asarray(pixels.permute(1, 2, 0).numpy())


def by_opencv(data: Encoded, reduction: int) -> Pixels | None:
    """OpenCV; four colours it turns into three in a way of its own, so they are not read."""
    with Image.open(io.BytesIO(data), formats=["JPEG"]) as image:
        if image.mode == "CMYK":
            return None
    found = cv2.imdecode(np.frombuffer(data, np.uint8), _OPENCV[reduction] | cv2.IMREAD_IGNORE_ORIENTATION)
    return None if found is None else np.asarray(cv2.cvtColor(found, cv2.COLOR_BGR2RGB))


_OPENCV = {
    1: cv2.IMREAD_COLOR,
    2: cv2.IMREAD_REDUCED_COLOR_2,
    4: cv2.IMREAD_REDUCED_COLOR_4,
    8: cv2.IMREAD_REDUCED_COLOR_8,
}

READERS: dict[str, Read] = {"simplejpeg": by_simplejpeg, "torchvision": by_torchvision, "OpenCV": by_opencv}
"""In the order in which they are tried; then comes Pillow, which reads everything."""


@cache
def library() -> str:
    """The name of the first reader that works, "Pillow" where none does."""
    return next((name for name, read in READERS.items() if _works(read)), "Pillow")


def reader() -> Read | None:
    """The first reader that works; None: Pillow."""
    return READERS.get(library())


def _works(read: Read) -> bool:
    stream = io.BytesIO()
    Image.radial_gradient("L").resize((90, 50)).convert("RGB").save(stream, "JPEG")
    sample = stream.getvalue()
    try:
        for reduction in (1, 2, 4, 8):
            pixels = read(sample, reduction)
            if pixels is None and reduction > 1:
                continue  # Pillow then does it.
            if pixels is None or not np.array_equal(pixels, by_pillow(sample, reduction)):
                return False
    except Exception:  # Without its library, or without the operator, each fails in a way of its own.
        return False
    try:
        return read(sample[: len(sample) // 2], 1) is None
    except Exception:
        return True


def by_pillow(data: Encoded, reduction: int) -> Pixels:
    """What all of them are compared with. Raises what Pillow raises."""
    with Image.open(io.BytesIO(data), formats=["JPEG"]) as image:
        if reduction > 1:
            image.draft(None, (image.width // reduction, image.height // reduction))
        return np.asarray(image.convert("RGB"))
