"""Encoded images to RGB pixels.

Owns: the formats that are read, their limits, EXIF orientation, the threads that decode. Must not know models or HTTP.

    bytes ─► read_header ─► check_pixels ─► decode (in the DecodePool) ─► uint8 [h, w, 3]

Formats are told by their first bytes, never by a name or a content type. Pixels are counted from the header, before
anything is decoded. torchvision's decoders do the common kinds (they release the interpreter lock and equal Pillow's
results), Pillow the rare ones. Alpha is dropped, as Pillow's convert("RGB") does; of 16 bits the upper eight are kept.

Errors: ImageError
          ├─ InvalidImageError   not an image, broken, or of a kind that is not read
          └─ ImageTooLargeError  more pixels than may be decoded
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from PIL import ExifTags, Image
from torch import Tensor
from torchvision.io import ImageReadMode

LARGE_PIXELS = 8_000_000
"""Pictures from this size on share all but one decode thread, so that they never hold up small ones."""

_FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF")
_Result = TypeVar("_Result")

# Our own limit is checked from the header before anything is decoded; Pillow's would only warn on the way there.
Image.MAX_IMAGE_PIXELS = None

# What people send by mistake, by its first bytes (after white space); ISO media files carry their brand at byte 8.
_KNOWN_OTHERS = (
    (b"<!doctype html", "an HTML page"),
    (b"<html", "an HTML page"),
    (b"<svg", "an SVG drawing"),
    (b"<?xml", "an XML document"),
    (b"%pdf", "a PDF document"),
    (b"ii*\0", "a TIFF image"),
    (b"mm\0*", "a TIFF image"),
    (b"pk\x03\x04", "a ZIP archive"),
    (b"\x1f\x8b", "a gzip file"),
    (b"{", "JSON"),
)
_KNOWN_BRANDS = {b"avif": "an AVIF image", b"heic": "a HEIC image", b"heix": "a HEIC image", b"mif1": "a HEIF image"}


class ImageError(Exception):
    """An image cannot be used; the message is one plain sentence for the client."""


class InvalidImageError(ImageError):
    """Not an image, a broken one, or of a kind that is not read."""


class ImageTooLargeError(ImageError):
    """More pixels than may be decoded."""


@dataclass(frozen=True, slots=True)
class Header:
    """What the first bytes say. `width` and `height` are pixels as displayed, `orientation` is EXIF's (1 to 8)."""

    format: str
    mode: str
    width: int
    height: int
    orientation: int


def read_header(encoded: bytes | memoryview) -> Header:
    """Format, size and orientation, without decoding (about 20 microseconds). Raises InvalidImageError."""
    if not encoded:
        raise InvalidImageError("the image is empty")
    with _open(encoded) as image:
        orientation = 1
        if "exif" in image.info or "Raw profile type exif" in image.info:
            orientation = _orientation(image)
        width, height = image.size
        # A camera's JPEG with previews behind it calls itself MPO; its first picture is a plain JPEG.
        kind = "JPEG" if image.format == "MPO" else str(image.format)
        mode = image.mode
    if width < 1 or height < 1:
        raise InvalidImageError(f"the image has no pixels ({width} x {height})")
    if orientation >= 5:
        width, height = height, width
    return Header(kind, mode, width, height, orientation)


def check_pixels(header: Header, max_pixels: int) -> None:
    """Raises ImageTooLargeError when the picture has more than `max_pixels` pixels."""
    if header.width * header.height > max_pixels:
        size = f"{header.width} x {header.height} = {header.width * header.height}"
        raise ImageTooLargeError(f"the image has {size} pixels; at most {max_pixels} are read")


def decode(encoded: bytes | memoryview, header: Header, size: tuple[int, int] | None = None) -> Tensor:
    """RGB pixels as displayed: uint8 [height, width, 3].

    `size`: the smallest (width, height), as displayed, that will do. A JPEG of at least twice that is decoded at a
    half, quarter or eighth of its size, in a third of the time or less. Raises InvalidImageError.
    """
    try:
        pixels = _decode(encoded, header, size)
    except MemoryError:
        raise
    except Exception as error:  # Decoders raise whatever they like at broken files.
        raise InvalidImageError(f"the {header.format} image is broken or truncated ({_brief(error)})") from error
    return _oriented(pixels, header.orientation)


def _decode(encoded: bytes | memoryview, header: Header, size: tuple[int, int] | None) -> Tensor:
    decoder = _DECODERS.get((header.format, header.mode))
    scaled = size is not None and header.format == "JPEG" and _scales(header, size)
    if decoder is not None and not scaled:
        # torch wants memory it may write to; copying the file is nothing beside decoding it.
        data = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
        return decoder(data).permute(1, 2, 0)
    with _open(encoded) as image:
        if scaled and size is not None:
            image.draft("RGB", size if header.orientation < 5 else size[::-1])
        image.load()
        return _rgb(image)


def _scales(header: Header, size: tuple[int, int]) -> bool:
    return header.width >= 2 * size[0] and header.height >= 2 * size[1]


def _rgb(image: Image.Image) -> Tensor:
    if image.mode.startswith("I"):
        grey = torch.from_numpy((np.asarray(image) >> 8).clip(0, 255).astype(np.uint8))
        return grey.unsqueeze(2).expand(-1, -1, 3)
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")  # Straight to RGB, Pillow warns that the transparency is lost; it is meant to be.
    return torch.from_numpy(np.array(image.convert("RGB")))


def _oriented(pixels: Tensor, orientation: int) -> Tensor:
    if orientation == 1:
        return pixels
    if orientation >= 5:
        pixels = pixels.transpose(0, 1)
    flips = {2: (1,), 3: (0, 1), 4: (0,), 5: (), 6: (1,), 7: (0, 1), 8: (0,)}[orientation]
    return pixels.flip(flips) if flips else pixels.contiguous()


def _orientation(image: Image.Image) -> int:
    try:
        value = image.getexif().get(ExifTags.Base.Orientation, 1)
    except Exception:  # Broken EXIF is no reason to refuse a picture; every viewer shows it upright.
        return 1
    return value if isinstance(value, int) and 1 <= value <= 8 else 1


def _open(encoded: bytes | memoryview) -> Image.Image:
    try:
        return Image.open(io.BytesIO(encoded), formats=_FORMATS)
    except Exception as error:  # Besides UnidentifiedImageError: whatever the parsers raise at broken headers.
        raise InvalidImageError(_what_it_is(bytes(encoded[:64]))) from error


def _what_it_is(start: bytes) -> str:
    text = start.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    kind = _KNOWN_BRANDS.get(start[8:12]) if start[4:8] == b"ftyp" else None
    kind = kind or next((name for first, name in _KNOWN_OTHERS if text.startswith(first)), None)
    read = "JPEG, PNG, WebP, BMP and GIF"
    if kind:
        return f"this is {kind}; {read} are read"
    return f"this is not an image that can be read ({read}), or its header is broken"


def _brief(error: Exception) -> str:
    message = " ".join(str(error).split()) or type(error).__name__
    # torchvision's errors begin with the path of its own source file.
    return message.rpartition(":")[2].strip()[:80] if ".cpp" in message else message[:80]


def _rgb_decoders() -> dict[tuple[str, str], Callable[[Tensor], Tensor]]:
    """torchvision's decoders for the kinds they read exactly as Pillow does; none where its C++ part is missing.

    The operators are called directly: since torchvision 0.29 their Python wrappers warn at every call. PNG is left to
    Pillow: torchvision's decoder (seen in 0.29.2) ends the process at a damaged file.
    """
    ops, rgb, by_exif = torch.ops.image, ImageReadMode.RGB.value, False
    if not hasattr(ops, "decode_jpeg"):
        return {}
    decoders: dict[tuple[str, str], Callable[[Tensor], Tensor]] = {
        ("JPEG", mode): lambda data: ops.decode_jpeg(data, rgb, by_exif) for mode in ("RGB", "L", "CMYK")
    }
    if hasattr(ops, "decode_webp"):
        decoders["WEBP", "RGB"] = lambda data: ops.decode_webp(data, rgb)
    return decoders


_DECODERS = _rgb_decoders()


class DecodePool:
    """Threads that decode, owned by one event loop. Work is taken in order; large pictures leave one thread free."""

    def __init__(self, threads: int) -> None:
        """At least two threads run, whatever `threads` says: one must stay free of large pictures."""
        threads = max(2, threads)
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="decode")
        self._large = asyncio.Semaphore(threads - 1)

    async def run(self, function: Callable[..., _Result], *args: Any, pixels: int = 0) -> _Result:
        """Run `function` in a thread; `pixels` is how much it has to decode.

        Cancelled before it began, it never begins. Cancelled later, this still waits until the thread is done, so that
        whatever the caller lent it (a slot) is free again when this returns.
        """
        if pixels < LARGE_PIXELS:
            return await self._submit(function, *args)
        async with self._large:
            return await self._submit(function, *args)

    async def _submit(self, function: Callable[..., _Result], *args: Any) -> _Result:
        future = self._executor.submit(function, *args)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            await _until_done(future)
            raise

    async def close(self) -> None:
        """End the threads; work that has not begun is dropped, work that has is waited for."""
        await asyncio.to_thread(self._executor.shutdown, cancel_futures=True)


async def _until_done(future: Future[Any]) -> None:
    """Wait for a thread's work to end, whatever its result, also while being cancelled again."""
    loop = asyncio.get_running_loop()
    done = asyncio.Event()
    future.add_done_callback(lambda _: loop.call_soon_threadsafe(done.set))
    while not done.is_set():
        try:
            await done.wait()
        except asyncio.CancelledError:
            continue
