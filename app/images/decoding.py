"""Decoding of images to RGB pixels, and their parts: cut out, and straightened if they are turned.

    bytes ─► read_header ─► check_pixels ─► decode ─► uint8 [h, w, 3] ─► part_of

Must not know threads, HTTP or the purpose of the parts. The result is Pillow's convert("RGB"): alpha is dropped,
palettes are looked up. Of 16 bits the upper eight are kept. The fastest library that is installed and works decodes
JPEG. Pillow decodes the rest, opened by format so that nothing is guessed and no metadata is read.

All libraries of JPEG end in libjpeg-turbo with its exact transform, so their pixels are the same to the bit. A library
is used only if it decodes a sample as Pillow does, at each scale it offers, and reports a file cut short. simplejpeg
brings a libjpeg-turbo of its own and is the fastest (docs/decoding.md); there are no builds of it for some processors,
where OpenCV takes its place. torchvision's decoder of PNG (0.29.2) ends the process at a wrong checksum.
"""

from __future__ import annotations

import contextlib
import io
import re
import struct
import zlib
from collections.abc import Callable
from functools import cache

import cv2
import numpy as np
import numpy.typing as npt
import torch
from PIL import Image, ImageFile
from PIL.BmpImagePlugin import BmpImageFile
from PIL.GifImagePlugin import GifImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.WebPImagePlugin import WebPImageFile
from torch import Tensor

from app.images.header import Format, Header, InvalidImageError
from models.contract.cascade import Region

Encoded = bytes | bytearray | memoryview
Pixels = npt.NDArray[np.uint8]
Read = Callable[[Encoded, int], Pixels | None]
"""Function that decodes at a whole, half, quarter or eighth (1, 2, 4, 8), sides rounded up: uint8 [height, width, 3] as
stored, None if it cannot or will not. May raise anything at a broken file."""

_MAX_SCANS = 100
"""Most scans of a JPEG: a progressive one has about ten. The decoder passes over every pixel for each, so a few bytes a
scan could keep a thread busy for minutes."""

_MAX_SEGMENTS = 5_000
"""Most segments of a JPEG: real files have tens, and each takes microseconds."""
_SCAN, _END = 0xDA, 0xD9
_marker = re.compile(rb"\xff[^\x00\x01\xff\xd0-\xd7]").search
"""Search for the next marker that has a length or is the end. It passes over the same bytes as a decoder: no markers (a
byte of 255 within a scan is followed by 0), fill bytes, and markers without a length, above all those of restarts."""
_MAX_CHUNKS = 100_000
_BAND_PIXELS = 1 << 18
_PIXEL_CHUNKS = frozenset({b"IHDR", b"PLTE", b"IDAT", b"IEND"})
STEPS = {1: (1, 1), 2: (1, -1), 3: (-1, -1), 4: (-1, 1), 5: (1, 1), 6: (1, -1), 7: (-1, -1), 8: (-1, 1)}
"""Steps down and across the stored image (its transpose from 5 on) for each EXIF orientation."""


def decode(encoded: Encoded, header: Header, size: tuple[int, int] | None = None) -> Tensor:
    """Return RGB pixels as displayed: uint8 [height, width, 3], contiguous.

    `size`: the smallest sufficient (width, height), as displayed; a JPEG of at least twice that is decoded at a half,
    quarter or eighth, its sides rounded up. Memory is bounded by the header's pixels: `check_pixels` first. A JPEG
    damaged in its middle is decoded as every decoder does; one that ends early is an error. Raises InvalidImageError.
    """
    try:
        if header.format == "JPEG":
            stored = _decode_jpeg(encoded, header, size)
        else:
            data = _pixel_chunks(encoded) if header.format == "PNG" else encoded
            with _FILES[header.format](io.BytesIO(data)) as image:
                stored = _rgb(image, header)
    except (MemoryError, InvalidImageError):
        raise
    except Exception as error:  # Decoders raise whatever they like at broken files.
        raise InvalidImageError(f"the {header.format} is broken or truncated") from error
    return torch.from_numpy(_oriented(stored, header.orientation))


def _decode_jpeg(encoded: Encoded, header: Header, size: tuple[int, int] | None) -> Pixels:
    check_scans(encoded)
    width, height = header.stored_size
    least_width, least_height = header.turn(*size) if size else (width, height)
    fits = [by for by in (8, 4, 2) if width >= by * least_width and height >= by * least_height]
    reduction = fits[0] if fits else 1
    read = READERS.get(library())
    pixels = None if read is None else read(encoded, reduction)
    if pixels is None:
        with _JpegFile(io.BytesIO(encoded)) as image:
            return _rgb(image, header, (least_width, least_height))
    if pixels.shape != (-(-height // reduction), -(-width // reduction), 3):
        raise InvalidImageError("the JPEG contradicts its header")
    return pixels


def check_scans(data: Encoded) -> None:
    """Raise InvalidImageError for a JPEG of more scans than any needs.

    This goes from segment to segment up to the image's end, as a decoder does: bytes that a phone appends (a film, a
    second image) or that lie within a segment (a small image) do not count. A scan ends at the next marker.
    """
    view = memoryview(data)
    at, scans = 2, 0
    for _ in range(_MAX_SEGMENTS):
        found = _marker(view, at)
        if found is None or (at := found.start()) + 4 > len(view) or view[at + 1] == _END:
            return
        if view[at + 1] == _SCAN:
            scans += 1
            if scans > _MAX_SCANS:
                raise InvalidImageError(f"the JPEG has more than {_MAX_SCANS} scans")
        at += 2 + int.from_bytes(view[at + 2 : at + 4], "big")
    raise InvalidImageError(f"the JPEG has more than {_MAX_SEGMENTS} segments")


class _JpegFile(JpegImageFile):
    def _read_dpi_from_exif(self) -> None:
        """Skip this: it is not needed, and damaged EXIF data would warn."""


_FILES: dict[Format, type[ImageFile.ImageFile]] = {
    "PNG": PngImageFile,
    "WebP": WebPImageFile,
    "BMP": BmpImageFile,
    "GIF": GifImageFile,
}


def sample_images() -> list[bytes]:
    """Return a small image of each format that this Pillow writes, and a JPEG large enough for a smaller scale."""
    images = []
    for kind, side, options in (("JPEG", 8, {}), ("JPEG", 64, {"progressive": True}), *((k, 8, {}) for k in _FILES)):
        stream = io.BytesIO()
        with contextlib.suppress(OSError, KeyError):
            Image.new("RGB", (side, side)).save(stream, kind.upper() if kind == "WebP" else kind, **options)
            images.append(stream.getvalue())
    return images


def _pixel_chunks(encoded: Encoded) -> bytes:
    """Return a PNG of only those chunks that make its pixels, their checksums verified.

    Pillow checks no checksum of image data, and would read (and inflate) all text on the way to it.
    """
    view = memoryview(encoded)
    kept, at = [view[:8]], 8
    for _ in range(_MAX_CHUNKS):
        length, kind = struct.unpack_from(">I4s", view, at)
        end = at + 12 + length
        if kind in _PIXEL_CHUNKS:
            (checksum,) = struct.unpack_from(">I", view, end - 4)
            if zlib.crc32(view[at + 4 : end - 4]) != checksum:
                raise InvalidImageError("the PNG is broken: a checksum is wrong")
            kept.append(view[at:end])
        elif not kind[0] & 0x20:
            raise InvalidImageError("the PNG has a critical chunk that no standard knows")
        if kind == b"IEND":
            return b"".join(kept)
        at = end
    raise InvalidImageError(f"the PNG has more than {_MAX_CHUNKS} chunks")


def _rgb(image: ImageFile.ImageFile, header: Header, least: tuple[int, int] | None = None) -> Pixels:
    """Return the first frame as stored; a JPEG at the smallest scale that is not under `least`."""
    if image.size != header.stored_size:  # Pixels were counted by our header, memory is taken by Pillow's.
        raise InvalidImageError(f"the {header.format} contradicts its header")
    if least:
        image.draft(None, least)
    image.load()
    width, height = image.size
    pixels: Pixels = np.empty((height, width, 3), np.uint8)
    rows = max(1, _BAND_PIXELS // width)
    for top in range(0, height, rows):  # In bands: a third of the memory, and it stays in the cache.
        band = image.crop((0, top, width, min(top + rows, height)))
        if band.mode.startswith("I"):
            pixels[top : top + rows] = (np.asarray(band) >> 8)[:, :, None]
        else:
            pixels[top : top + rows] = np.asarray(band.convert("RGB"))
    return pixels


def _oriented(stored: Pixels, orientation: int) -> Pixels:
    if orientation == 1:
        return stored
    down, across = STEPS[orientation]
    points = stored.view("V3")[:, :, 0]  # A pixel as one item: numpy copies those faster than three bytes.
    turned = (points.T if orientation >= 5 else points)[::down, ::across]
    return np.ascontiguousarray(turned).view(np.uint8).reshape(*turned.shape, 3)


def by_simplejpeg(data: Encoded, reduction: int) -> Pixels | None:
    """Decode with simplejpeg; return None for damage, which it cannot tell from an early end."""
    import simplejpeg

    try:
        height, width, colours, _ = simplejpeg.decode_jpeg_header(data)
        if colours in ("CMYK", "YCCK"):  # These it turns into three colours in a way of its own.
            return None
        least = {} if reduction == 1 else {"min_height": -(-height // reduction), "min_width": -(-width // reduction)}
        return np.asarray(simplejpeg.decode_jpeg(data, "RGB", **least))
    except ValueError:
        return None


def by_opencv(data: Encoded, reduction: int) -> Pixels | None:
    """Decode with OpenCV; return None for four colours, which it converts in a way of its own."""
    with Image.open(io.BytesIO(data), formats=["JPEG"]) as image:
        if image.mode == "CMYK":
            return None
    flags = cv2.IMREAD_COLOR if reduction == 1 else getattr(cv2, f"IMREAD_REDUCED_COLOR_{reduction}")
    found = cv2.imdecode(np.frombuffer(data, np.uint8), flags | cv2.IMREAD_IGNORE_ORIENTATION)
    return None if found is None else np.asarray(cv2.cvtColor(found, cv2.COLOR_BGR2RGB))


READERS: dict[str, Read] = {"simplejpeg": by_simplejpeg, "OpenCV": by_opencv}
"""Readers in the order of trial; after them comes Pillow, which reads everything."""


@cache
def library() -> str:
    """Return the name of the first reader that works, "Pillow" if none does."""
    return next((name for name, read in READERS.items() if _works(read)), "Pillow")


def _works(read: Read) -> bool:
    stream = io.BytesIO()
    Image.radial_gradient("L").resize((90, 50)).convert("RGB").save(stream, "JPEG")
    sample = stream.getvalue()
    try:
        for reduction in (1, 2, 4, 8):
            pixels = read(sample, reduction)
            if pixels is None or not np.array_equal(pixels, by_pillow(sample, reduction)):
                return False
    except Exception:  # Without its library each fails in a way of its own.
        return False
    try:
        return read(sample[: len(sample) // 2], 1) is None
    except Exception:
        return True


def by_pillow(data: Encoded, reduction: int) -> Pixels:
    """Decode with Pillow, as the reference for all others. Raises what Pillow raises."""
    with Image.open(io.BytesIO(data), formats=["JPEG"]) as image:
        if reduction > 1:
            image.draft(None, (image.width // reduction, image.height // reduction))
        return np.asarray(image.convert("RGB"))


def part_of(image: Tensor, region: Region) -> Tensor:
    """Return the pixels of a region, contiguous. Raises InvalidImageError for one that lies outside."""
    height, width = image.shape[:2]
    x, y, columns, rows, quarters, corners = region
    if corners and np.isfinite(corners).all() and min(columns, rows) > 0 and max(columns, rows) <= width + height:
        square = np.array(((0, 0), (columns, 0), (columns, rows), (0, rows)), np.float32)
        turn = cv2.getPerspectiveTransform(np.array(corners, np.float32).reshape(4, 2), square)
        part = cv2.warpPerspective(
            image.numpy(), turn, (columns, rows), flags=cv2.INTER_CUBIC, borderMode=cv2.BORDER_REPLICATE
        )
    elif not corners and min(x, y) >= 0 and 0 < columns <= width - x and 0 < rows <= height - y:
        part = image[y : y + rows, x : x + columns].numpy()
    else:
        raise InvalidImageError(f"the image of {width} x {height} has no region at {x}, {y}")
    return torch.from_numpy(np.ascontiguousarray(np.rot90(part, quarters)))
