"""Decoding: the same pixels as Pillow for every kind that is read, one clear error for everything else."""

import asyncio
import io
import threading
import warnings

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

from app import images
from tests.photographs import FILES


def picture(width=60, height=40):
    """Smooth colours with some edges, the same every time."""
    y, x = np.mgrid[0:height, 0:width]
    rgb = np.stack([x * 255 // width, y * 255 // height, (x + y) % 64 * 4], axis=2).astype(np.uint8)
    rgb[height // 3 : height // 2, width // 4 : width // 2] = (250, 30, 60)
    return Image.fromarray(rgb)


def encode(image, kind, **options):
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def decode(encoded, size=None):
    header = images.read_header(encoded)
    pixels = images.decode(encoded, header, size)
    assert pixels.dtype == torch.uint8
    if size is None:
        assert tuple(pixels.shape) == (header.height, header.width, 3)
    return pixels.numpy().astype(int)


def by_pillow(encoded):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(encoded))).convert("RGB")).astype(int)


def transparent(mode):
    image = picture().convert("RGBA")
    image.putalpha(Image.linear_gradient("L").resize(image.size))
    return image.convert(mode)


KINDS = {
    "JPEG": encode(picture(), "JPEG", quality=90),
    "progressive JPEG": encode(picture(), "JPEG", progressive=True),
    "JPEG without subsampling": encode(picture(), "JPEG", subsampling=0),
    "JPEG with odd sides": encode(picture(61, 37), "JPEG"),
    "grey JPEG": encode(picture().convert("L"), "JPEG"),
    "CMYK JPEG": encode(picture().convert("CMYK"), "JPEG"),
    "PNG": encode(picture(), "PNG"),
    "grey PNG": encode(picture().convert("L"), "PNG"),
    "bilevel PNG": encode(picture().convert("1"), "PNG"),
    "palette PNG": encode(picture().quantize(16), "PNG"),
    "palette PNG with transparency": encode(picture().quantize(16), "PNG", transparency=bytes(range(0, 160, 10))),
    "palette PNG with one transparent colour": encode(picture().quantize(16), "PNG", transparency=3),
    "PNG with alpha": encode(transparent("RGBA"), "PNG"),
    "grey PNG with alpha": encode(transparent("LA"), "PNG"),
    "WebP": encode(picture(), "WEBP", quality=80),
    "lossless WebP": encode(picture(), "WEBP", lossless=True),
    "WebP with alpha": encode(transparent("RGBA"), "WEBP", lossless=True, exact=True),
    "BMP": encode(picture(), "BMP"),
    "palette BMP": encode(picture().quantize(16), "BMP"),
    "GIF": encode(picture(), "GIF"),
    "animated GIF": encode(picture(), "GIF", save_all=True, append_images=[picture().rotate(180)]),
}


@pytest.mark.parametrize("kind", KINDS)
def test_pixels_equal_pillows(kind):
    assert np.abs(decode(KINDS[kind]) - by_pillow(KINDS[kind])).max() <= 1


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_photographs_equal_pillows(path):
    encoded = path.read_bytes()
    assert np.abs(decode(encoded) - by_pillow(encoded)).max() <= 1


def test_of_sixteen_bits_the_upper_eight_are_kept():
    grey = (np.arange(40 * 60, dtype=np.uint16) * 27).reshape(40, 60)
    encoded = encode(Image.fromarray(grey), "PNG")
    assert (decode(encoded) == (grey >> 8)[:, :, None]).all()


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_exif_orientation_is_applied(kind, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    encoded = encode(picture(), kind, exif=exif, **({"lossless": True} if kind == "WEBP" else {}))
    header = images.read_header(encoded)
    assert header.orientation == orientation
    assert (header.width, header.height) == ((60, 40) if orientation < 5 else (40, 60))
    assert np.abs(decode(encoded) - by_pillow(encoded)).max() <= 1


def test_broken_exif_is_no_reason_to_refuse_a_picture():
    encoded = encode(picture(), "JPEG", exif=b"Exif\0\0II*\0\xff\xff\xff\xff")
    assert images.read_header(encoded).orientation == 1
    assert decode(encoded).shape == (40, 60, 3)


@pytest.mark.parametrize("orientation", [1, 6])
@pytest.mark.parametrize("divisor", [2, 4, 8])
def test_a_large_jpeg_is_decoded_at_reduced_size_but_never_under_what_was_asked(divisor, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    encoded = encode(picture(1600, 800), "JPEG", exif=exif, quality=95)
    header = images.read_header(encoded)
    wanted = (header.width // divisor, header.height // divisor)
    pixels = decode(encoded, wanted)
    assert pixels.shape == (wanted[1], wanted[0], 3)
    full = Image.fromarray(by_pillow(encoded).astype(np.uint8)).resize(wanted, Image.Resampling.BOX)
    assert np.abs(pixels - np.asarray(full).astype(int)).mean() < 1.5


def test_a_picture_hardly_larger_than_asked_is_decoded_in_full():
    encoded = encode(picture(300, 200), "JPEG")
    assert decode(encoded, (151, 100)).shape == (200, 300, 3)


def test_pixels_are_counted_before_decoding():
    # 60 million pixels that compress to little; nothing but the header may be touched.
    encoded = encode(Image.new("L", (10_000, 6_000)), "PNG")
    header = images.read_header(encoded)
    with pytest.raises(images.ImageTooLargeError, match="10000 x 6000 = 60000000 pixels; at most 50000000"):
        images.check_pixels(header, 50_000_000)
    images.check_pixels(header, 60_000_000)


OTHERS = {
    "HTML": (b"<!DOCTYPE html><html><body>404</body></html>", "an HTML page"),
    "HTML after blanks": (b"\n  <html></html>", "an HTML page"),
    "SVG": (b'<svg xmlns="http://www.w3.org/2000/svg"/>', "an SVG drawing"),
    "PDF": (b"%PDF-1.7 ...", "a PDF document"),
    "TIFF": (encode(picture(), "TIFF"), "a TIFF image"),
    "AVIF": (b"\0\0\0\x20ftypavif\0\0\0\0avifmif1", "an AVIF image"),
    "HEIC": (b"\0\0\0\x20ftypheic\0\0\0\0heicmif1", "a HEIC image"),
    "JSON": (b'{"instances": []}', "JSON"),
    "noise": (bytes(range(200)), "not an image that can be read"),
    "a JPEG's first bytes": (b"\xff\xd8\xff\xe0", "not an image that can be read"),
    "nothing": (b"", "empty"),
}


@pytest.mark.parametrize("other", OTHERS)
def test_what_is_not_an_image_is_named(other):
    encoded, name = OTHERS[other]
    with pytest.raises(images.InvalidImageError, match=name):
        images.read_header(encoded)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "animated" not in kind])
@pytest.mark.parametrize("part", [0.3, 0.6, 0.9])
def test_a_truncated_file_is_an_error(kind, part):
    encoded = KINDS[kind]
    with pytest.raises(images.InvalidImageError):
        decode(encoded[: int(len(encoded) * part)])


def test_a_jpeg_without_its_last_two_bytes_is_an_error():
    with pytest.raises(images.InvalidImageError, match="broken or truncated"):
        decode(KINDS["JPEG"][:-2])


def test_a_scaled_truncated_jpeg_is_an_error():
    encoded = encode(picture(1600, 800), "JPEG")
    with pytest.raises(images.InvalidImageError, match="broken or truncated"):
        decode(encoded[: len(encoded) // 2], (200, 100))


def test_a_png_with_a_wrong_checksum_is_an_error():
    encoded = bytearray(KINDS["PNG"])
    encoded[encoded.index(b"IDAT") + 20] ^= 0xFF
    with pytest.raises(images.InvalidImageError):
        decode(bytes(encoded))


def _only_our_errors(encoded):
    try:
        header = images.read_header(encoded)
        images.check_pixels(header, 100_000)
        images.decode(encoded, header, (8, 8))
    except images.ImageError as error:
        assert str(error)
        assert "\n" not in str(error)


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=200))
@example(b"GIF89a\0\0\0\0\0\0\0")
@example(b"BM" + bytes(60))
def test_random_bytes_raise_nothing_but_our_errors(encoded):
    _only_our_errors(encoded)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(sorted(KINDS)), st.data())
def test_flipped_and_cut_files_raise_nothing_but_our_errors(kind, data):
    encoded = bytearray(KINDS[kind])
    for _ in range(data.draw(st.integers(0, 4))):
        encoded[data.draw(st.integers(0, min(len(encoded) - 1, 200)))] = data.draw(st.integers(0, 255))
    _only_our_errors(bytes(encoded[: data.draw(st.integers(1, len(encoded)))]))


def test_memoryviews_are_read_too():
    assert (decode(memoryview(KINDS["JPEG"])) == decode(KINDS["JPEG"])).all()
    assert (decode(memoryview(KINDS["GIF"])) == decode(KINDS["GIF"])).all()


@pytest.fixture
async def pool():
    pool = images.DecodePool(2)
    yield pool
    await pool.close()


async def test_the_pool_answers_and_passes_errors_on(pool):
    assert await pool.run(lambda a, b: a + b, 1, 2) == 3
    with pytest.raises(ZeroDivisionError):
        await pool.run(lambda: 1 / 0)


async def test_large_pictures_leave_a_thread_to_small_ones(pool):
    release = threading.Event()
    large = [asyncio.ensure_future(pool.run(release.wait, pixels=50_000_000)) for _ in range(5)]
    assert await asyncio.wait_for(pool.run(lambda: "small"), 10) == "small"
    assert not any(task.done() for task in large)
    release.set()
    assert await asyncio.gather(*large) == [True] * 5


async def test_work_cancelled_before_it_begins_never_begins(pool):
    release, ran = threading.Event(), []
    busy = [asyncio.ensure_future(pool.run(release.wait)) for _ in range(2)]
    waiting = asyncio.ensure_future(pool.run(ran.append, 1))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    release.set()
    await asyncio.gather(*busy)
    assert ran == []


async def test_work_cancelled_while_it_runs_is_waited_for(pool):
    started, release, finished = threading.Event(), threading.Event(), []

    def work():
        started.set()
        release.wait()
        finished.append(True)

    task = asyncio.ensure_future(pool.run(work))
    await asyncio.to_thread(started.wait)
    task.cancel()
    for _ in range(10):
        await asyncio.sleep(0)
    task.cancel()  # A second time, while it waits for the thread.
    for _ in range(10):
        await asyncio.sleep(0)
    assert not task.done()
    release.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert finished == [True]


async def test_closing_ends_the_threads():
    pool = images.DecodePool(2)
    await pool.run(lambda: None)
    await pool.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("decode")]
    with pytest.raises(RuntimeError):
        await pool.run(lambda: None)
