"""Encoded images to RGB pixels.

Owns: decoding, EXIF orientation, the threads that decode. Must not know models or HTTP.

    bytes ─► read_header ─► check_pixels ─► decode (in the DecodePool) ─► uint8 [h, w, 3]

The result is Pillow's convert("RGB"): alpha is dropped, palettes are looked up. Of 16 bits the upper eight are kept.
torchvision decodes JPEG (faster than Pillow, and to the same pixels), Pillow large JPEG at reduced scale and everything
else, opened by format so that nothing is guessed and no metadata is read.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import io
import struct
import zlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from typing import Any, TypeVar

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

from app.image_header import (
    Format,
    Header,
    ImageError,
    ImageTooLargeError,
    InvalidImageError,
    check_pixels,
    read_header,
)
from models.vision import torchvision

__all__ = [
    "LARGE_PIXELS",
    "DecodePool",
    "DecodeQueueFullError",
    "Header",
    "ImageError",
    "ImageTooLargeError",
    "InvalidImageError",
    "check_pixels",
    "decode",
    "read_header",
]

LARGE_PIXELS = 16_000_000
"""Pictures from this size on share all but one decode thread, so that they never hold up small ones. Above what phones
and cameras commonly send (12 million): of ordinary pictures every thread may take one."""

_MAX_SCANS = 100
"""Scans of a JPEG: a progressive one has about ten, and each makes the decoder pass over every pixel, so that a few
bytes a scan could keep a thread busy for minutes."""

_MAX_CHUNKS = 100_000
_BAND_PIXELS = 1 << 18
_PIXEL_CHUNKS = frozenset({b"IHDR", b"PLTE", b"IDAT", b"IEND"})
_STEPS = {1: (1, 1), 2: (1, -1), 3: (-1, -1), 4: (-1, 1), 5: (1, 1), 6: (1, -1), 7: (-1, -1), 8: (-1, 1)}
"""Down and across the stored picture (its transpose from 5 on) for each EXIF orientation."""

Encoded = bytes | bytearray | memoryview
_Pixels = npt.NDArray[np.uint8]
_Result = TypeVar("_Result")


def decode(encoded: Encoded, header: Header, size: tuple[int, int] | None = None) -> Tensor:
    """RGB pixels as displayed: uint8 [height, width, 3], contiguous.

    `size`: the smallest (width, height), as displayed, that will do; a JPEG of at least twice that is decoded at a
    half, quarter or eighth, its sides rounded up. Memory is bounded by the header's pixels: `check_pixels` first.
    A JPEG damaged in its middle is decoded as every decoder does; one that ends early is an error.
    Raises InvalidImageError.
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


def _decode_jpeg(encoded: Encoded, header: Header, size: tuple[int, int] | None) -> _Pixels:
    data = bytearray(encoded)  # torch wants memory it may write to; the copy is nothing beside decoding.
    if data.count(b"\xff\xda") > _MAX_SCANS:
        raise InvalidImageError(f"the JPEG has more than {_MAX_SCANS} scans")
    width, height = header.stored_size
    least_width, least_height = header.turn(*size) if size else (width, height)
    scalable = width >= 2 * least_width and height >= 2 * least_height
    if scalable or not _torchvision_reads_jpeg():
        with _JpegFile(io.BytesIO(data)) as image:
            return _rgb(image, header, (least_width, least_height))
    pixels: _Pixels = _torchvision_jpeg(data).permute(1, 2, 0).numpy()
    if pixels.shape != (height, width, 3):
        raise InvalidImageError("the JPEG contradicts its header")
    return pixels


def _torchvision_jpeg(data: bytearray) -> Tensor:
    """uint8 [3, height, width], the channels last in memory.

    The operator is called directly: since torchvision 0.29 its Python wrapper warns at every call. Only JPEG goes this
    way: torchvision's PNG decoder (0.29.2) ends the process at a wrong checksum, its WebP decoder knows no animations.
    """
    pixels: Tensor = torch.ops.image.decode_jpeg(
        torch.frombuffer(data, dtype=torch.uint8), torchvision.io.ImageReadMode.RGB.value, False
    )
    return pixels


@cache
def _torchvision_reads_jpeg() -> bool:
    """Some builds of torchvision come without libjpeg, and the operator is announced to go."""
    stream = io.BytesIO()
    Image.new("RGB", (8, 8)).save(stream, "JPEG")
    try:
        return _torchvision_jpeg(bytearray(stream.getvalue())).shape == (3, 8, 8)
    except (RuntimeError, AttributeError):
        return False


class _JpegFile(JpegImageFile):
    def _read_dpi_from_exif(self) -> None:
        """Not read: nobody asks for it, and damaged EXIF data would warn."""


_FILES: dict[Format, type[ImageFile.ImageFile]] = {
    "PNG": PngImageFile,
    "WebP": WebPImageFile,
    "BMP": BmpImageFile,
    "GIF": GifImageFile,
}


def _pixel_chunks(encoded: Encoded) -> bytes:
    """A PNG of only those chunks that make its pixels, their checksums verified.

    Pillow checks no checksum of picture data, and would read (and inflate) all text on the way to it.
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


def _rgb(image: ImageFile.ImageFile, header: Header, least: tuple[int, int] | None = None) -> _Pixels:
    """The first frame as stored; of a JPEG at the smallest scale that is not under `least`."""
    if image.size != header.stored_size:  # Pixels were counted by our header, memory is taken by Pillow's.
        raise InvalidImageError(f"the {header.format} contradicts its header")
    if least:
        image.draft(None, least)
    image.load()
    width, height = image.size
    pixels: _Pixels = np.empty((height, width, 3), np.uint8)
    rows = max(1, _BAND_PIXELS // width)
    for top in range(0, height, rows):  # In bands: a third of the memory, and it stays in the cache.
        band = image.crop((0, top, width, min(top + rows, height)))
        if band.mode.startswith("I"):
            pixels[top : top + rows] = (np.asarray(band) >> 8)[:, :, None]
        else:
            pixels[top : top + rows] = np.asarray(band.convert("RGB"))
    return pixels


def _oriented(stored: _Pixels, orientation: int) -> _Pixels:
    if orientation == 1:
        return stored
    down, across = _STEPS[orientation]
    points = stored.view("V3")[:, :, 0]  # A pixel as one item: numpy copies those faster than three bytes.
    turned = (points.T if orientation >= 5 else points)[::down, ::across]
    return np.ascontiguousarray(turned).view(np.uint8).reshape(*turned.shape, 3)


class DecodeQueueFullError(Exception):
    """As many images are being decoded, or wait for it, as may be."""


class DecodePool:
    """Threads that decode, owned by one event loop. Work is taken in order; large pictures leave one thread free."""

    def __init__(self, threads: int, limit: int) -> None:
        """At least two threads run, whatever `threads` says: one must stay free of large pictures.

        `limit`: pictures that may be decoded or wait for it, of which an eighth may be large ones.
        """
        threads = max(2, threads)
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="decode")
        self._large = asyncio.Semaphore(threads - 1)
        self._limit = limit
        self._large_limit = max(1, limit // 8)
        self._here = 0
        self._large_here = 0

    async def decode(self, function: Callable[..., _Result], *args: Any, pixels: int) -> _Result:
        """As `run`, for a function that decodes so many pixels. Raises DecodeQueueFullError at once."""
        large = pixels >= LARGE_PIXELS
        if self._here >= self._limit or (large and self._large_here >= self._large_limit):
            kind = "large images" if self._here < self._limit else "images"
            here = self._large_here if self._here < self._limit else self._here
            raise DecodeQueueFullError(f"{here} {kind} are waiting to be decoded")
        self._here += 1
        self._large_here += large
        try:
            if not large:
                return await self.run(function, *args)
            async with self._large:
                return await self.run(function, *args)
        finally:
            self._here -= 1
            self._large_here -= large

    async def run(self, function: Callable[..., _Result], *args: Any) -> _Result:
        """Run `function` in a thread.

        When this ends, however it ends, no thread runs `function` and none will: what the caller lent it (a slot) is
        the caller's again. So work cancelled before it begins never begins, and work cancelled later is waited for.
        Raises RuntimeError once the pool is closed, and what `function` raises.
        """
        work = self._executor.submit(function, *args)
        try:
            await _ended(work)
        except asyncio.CancelledError:
            work.cancel()
            while not work.done():
                with suppress(asyncio.CancelledError):
                    await _ended(work)
            raise
        try:
            return work.result()
        except concurrent.futures.CancelledError:
            raise RuntimeError("the decode pool was closed") from None

    async def close(self) -> None:
        """End the threads; work that has not begun is dropped, work that has is waited for."""
        await asyncio.to_thread(self._executor.shutdown, cancel_futures=True)


async def _ended(work: Future[Any]) -> None:
    """Wait for work to end; unlike asyncio.wrap_future, to be cancelled oneself says nothing to the work."""
    loop = asyncio.get_running_loop()
    ended = loop.create_future()

    def wake() -> None:
        if not ended.done():
            ended.set_result(None)

    def notify(_: Future[Any]) -> None:
        with suppress(RuntimeError):  # The loop is closed: nobody waits any more.
            loop.call_soon_threadsafe(wake)

    work.add_done_callback(notify)
    await ended
