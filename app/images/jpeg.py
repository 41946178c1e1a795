"""A JPEG at its full size, by the fastest library that is here and works.

Owns: the order of libraries, and finding out which of them can be used. Must not know what a JPEG's header says.

All of them end in libjpeg-turbo with its exact transform, so their pixels are the same to the bit; a reader counts only
if it decodes a sample as Pillow does and says that a file cut short is one. torchvision's operator is called directly:
since 0.29 its Python wrapper warns at every call, as image decoding is announced to leave torchvision. Then OpenCV
takes over. torchcodec wants FFmpeg and has no build for vendors' older torches, simplejpeg is no faster than OpenCV
(docs/performance.md), and OpenCV is here anyway.
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
Read = Callable[[Encoded], Pixels | None]
"""uint8 [height, width, 3] as stored; None where it cannot or will not. May raise anything at a broken file."""


def by_torchvision(data: Encoded) -> Pixels | None:
    """The operator behind torchvision.io.decode_jpeg; some builds come without libjpeg."""
    writable = data if isinstance(data, bytearray) or not memoryview(data).readonly else bytearray(data)
    encoded = torch.frombuffer(writable, dtype=torch.uint8)  # It would not write, but asks for memory that it could.
    pixels = torch.ops.image.decode_jpeg(encoded, torchvision.io.ImageReadMode.RGB.value, False)
    return np.asarray(pixels.permute(1, 2, 0).numpy())


def by_opencv(data: Encoded) -> Pixels | None:
    """OpenCV; four colours it turns into three in a way of its own, so they are not read."""
    with Image.open(io.BytesIO(data), formats=["JPEG"]) as image:
        if image.mode == "CMYK":
            return None
    flags = cv2.IMREAD_COLOR | cv2.IMREAD_IGNORE_ORIENTATION
    found = cv2.imdecode(np.frombuffer(data, np.uint8), flags)
    return None if found is None else np.asarray(cv2.cvtColor(found, cv2.COLOR_BGR2RGB))


READERS: dict[str, Read] = {"torchvision": by_torchvision, "OpenCV": by_opencv}
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
    Image.radial_gradient("L").resize((40, 24)).convert("RGB").save(stream, "JPEG")
    sample = stream.getvalue()
    try:
        if not np.array_equal(read(sample), np.asarray(Image.open(stream).convert("RGB"))):  # type: ignore[arg-type]
            return False
    except Exception:  # Without its library, or without the operator, each fails in a way of its own.
        return False
    try:
        return read(sample[: len(sample) // 2]) is None
    except Exception:
        return True
