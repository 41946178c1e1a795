"""Decoding: Pillow's pixels for every kind that is read, one clear error for everything else; parts of images."""

from __future__ import annotations

import contextlib
import io
import struct
import warnings
import zlib
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import PIL
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageOps

from app.decoder import main
from app.decoder.decoder import Decoder
from app.decoder.messages import Decoded, DecodePlan, Inbox, Job, Kind, Status
from app.images import decoding
from app.images.decoding import part_of
from app.images.header import (
    ImageTooLargeError,
    InvalidImageError,
    check_pixels,
    read_header,
)
from app.processes.arena import Arena
from app.processes.channel import reader, to_packet
from models import PixelModel, open_model, parse_spec
from models.contract.cascade import Region
from tests.support.images import encoded as encode
from tests.support.images import turned
from tests.support.photographs import FILES


def sample_image(width=60, height=40):
    """Smooth colours with some edges, the same every time."""
    y, x = np.mgrid[0:height, 0:width]
    rgb = np.stack([x * 255 // width, y * 255 // height, (x + y) % 64 * 4], axis=2).astype(np.uint8)
    rgb[height // 3 : height // 2, width // 4 : width // 2] = (250, 30, 60)
    return Image.fromarray(rgb)


def decode(encoded, size=None):
    header = read_header(encoded)
    pixels = decoding.decode(encoded, header, size)
    assert pixels.dtype == torch.uint8
    if size is None:
        assert tuple(pixels.shape) == (header.height, header.width, 3)
    return pixels.numpy().astype(int)


def by_pillow(encoded):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(encoded))).convert("RGB")).astype(int)


def transparent(mode):
    image = sample_image().convert("RGBA")
    image.putalpha(Image.linear_gradient("L").resize(image.size))
    return image.convert(mode)


def _adobe(jpeg, transform):
    at = jpeg.index(b"Adobe") + 11
    return jpeg[:at] + bytes([transform]) + jpeg[at + 1 :]


def _run_length_coded(compression):
    bmp = bytearray(encode(sample_image().quantize(16), "BMP"))
    struct.pack_into("<I", bmp, 30, compression)
    return bytes(bmp)


def _flipped(bmp):
    (height,) = struct.unpack_from("<i", bmp, 22)
    return bmp[:22] + struct.pack("<i", -height) + bmp[26:]


def chunk(kind, content=b""):
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def png(bit_depth, colour_type, rows):
    height, width = rows.shape[:2]
    header = struct.pack(">IIBBBBB", width, height, bit_depth, colour_type, 0, 0, 0)
    content = zlib.compress(b"".join(b"\0" + row.tobytes() for row in rows))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", content) + chunk(b"IEND")


KINDS = {
    "JPEG": encode(sample_image(), "JPEG", quality=90),
    "progressive JPEG": encode(sample_image(), "JPEG", progressive=True),
    "JPEG with odd sides": encode(sample_image(61, 37), "JPEG"),
    "grey JPEG": encode(sample_image().convert("L"), "JPEG"),
    "CMYK JPEG": encode(sample_image().convert("CMYK"), "JPEG"),
    "YCCK JPEG": _adobe(encode(sample_image().convert("CMYK"), "JPEG"), transform=2),
    "CMYK JPEG not by Adobe": encode(sample_image().convert("CMYK"), "JPEG").replace(b"Adobe", b"Other"),
    "RGB JPEG": encode(sample_image(), "JPEG", keep_rgb=True),
    "JPEG with restarts": encode(sample_image(), "JPEG", restart_marker_blocks=1),
    "JPEG with fill bytes and junk between segments": b"\xff\xd8\xff\xff\0\x17\xff"
    + encode(sample_image(), "JPEG")[3:],
    "PNG": encode(sample_image(), "PNG"),
    "grey PNG": encode(sample_image().convert("L"), "PNG"),
    "bilevel PNG": encode(sample_image().convert("1"), "PNG"),
    "palette PNG": encode(sample_image().quantize(16), "PNG"),
    "palette PNG with transparency": encode(sample_image().quantize(16), "PNG", transparency=bytes(range(0, 160, 10))),
    "PNG with alpha": encode(transparent("RGBA"), "PNG"),
    "grey PNG with alpha": encode(transparent("LA"), "PNG"),
    "PNG of two bits": encode(sample_image().quantize(4), "PNG", bits=2),
    "animated PNG": encode(sample_image(), "PNG", save_all=True, append_images=[sample_image().rotate(180)]),
    "WebP": encode(sample_image(), "WEBP", quality=80),
    "lossless WebP": encode(sample_image(), "WEBP", lossless=True),
    "WebP with alpha": encode(transparent("RGBA"), "WEBP", lossless=True, exact=True),
    "animated WebP": encode(
        sample_image(), "WEBP", lossless=True, save_all=True, append_images=[sample_image().rotate(180)]
    ),
    "BMP": encode(sample_image(), "BMP"),
    "grey BMP": encode(sample_image().convert("L"), "BMP"),
    "BMP with its top row first": _flipped(encode(sample_image(), "BMP")),
    "palette BMP": encode(sample_image().quantize(16), "BMP"),
    "GIF": encode(sample_image(), "GIF"),
    "animated GIF": encode(sample_image(), "GIF", save_all=True, append_images=[sample_image().rotate(180)]),
}


@pytest.mark.parametrize("kind", KINDS)
def test_pixels_equal_pillows(kind):
    assert np.abs(decode(KINDS[kind]) - by_pillow(KINDS[kind])).max() <= 1


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "JPEG" in kind])
@pytest.mark.parametrize("library", [*decoding.READERS, "Pillow"])
def test_every_library_gives_the_same_pixels(kind, library, monkeypatch):
    pixels = decode(KINDS[kind])
    monkeypatch.setattr(decoding, "library", lambda: library)
    assert np.abs(decode(KINDS[kind]) - pixels).max() <= ("CMYK" in kind)
    with pytest.raises(InvalidImageError):
        decode(KINDS[kind][: len(KINDS[kind]) // 2])


@pytest.mark.parametrize("path", [path for path in FILES if path.suffix == ".jpg"], ids=lambda path: path.name)
def test_every_reader_of_jpeg_has_pillows_pixels_to_the_bit(path):
    encoded = path.read_bytes()
    for name, read in decoding.READERS.items():
        for reduction in (1, 2, 4, 8):
            for data in (encoded, memoryview(encoded), bytearray(encoded)):
                pixels = read(data, reduction)
                assert pixels is not None, name
                assert np.array_equal(pixels, decoding.by_pillow(encoded, reduction))


def test_a_gif_is_as_large_as_its_first_frame():
    encoded = bytearray(KINDS["GIF"])
    encoded[6:10] = struct.pack("<HH", 30, 50)
    header = read_header(encoded)
    assert (header.width, header.height) == (60, 50)
    assert (decode(encoded) == by_pillow(encoded)).all()


@pytest.mark.parametrize(("colour_type", "channels"), [(2, 3), (4, 2), (6, 4)])
def test_of_sixteen_bit_colours_the_upper_eight_are_kept(colour_type, channels):
    values = (np.arange(40 * 60 * channels, dtype=np.uint16) * 27).reshape(40, 60, channels)
    colours = values[:, :, :3] if channels > 2 else values[:, :, :1]
    assert (decode(png(16, colour_type, values.astype(">u2"))) == colours >> 8).all()


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_exif_orientation_is_applied(kind, orientation):
    encoded = encode(sample_image(), kind, exif=turned(orientation), **({"lossless": True} if kind == "WEBP" else {}))
    header = read_header(encoded)
    assert header.orientation == orientation
    assert (header.width, header.height) == ((60, 40) if orientation < 5 else (40, 60))
    assert np.abs(decode(encoded) - by_pillow(encoded)).max() <= 1


@pytest.mark.parametrize("entry", [(0x0112, 3, 1, 9), (0x0112, 3, 1, 0), (0x0112, 2, 1, 6), (0x011A, 5, 1, 0xFFFF)])
def test_senseless_exif_is_no_orientation_and_no_warning(entry):
    exif = b"Exif\0\0II*\0\x08\0\0\0\x01\0" + struct.pack("<HHII", *entry) + bytes(4)
    encoded = encode(sample_image(1600, 800), "JPEG", exif=exif)
    assert read_header(encoded).orientation == 1
    assert decode(encoded, (200, 100)).shape == (100, 200, 3)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("divisor", [2, 4, 8])
def test_a_large_jpeg_is_decoded_at_reduced_size_but_never_under_what_was_asked(divisor, orientation):
    encoded = encode(sample_image(1600, 800), "JPEG", exif=turned(orientation), quality=95)
    header = read_header(encoded)
    wanted = (header.width // divisor, header.height // divisor)
    pixels = decode(encoded, wanted)
    assert pixels.shape == (wanted[1], wanted[0], 3)
    full = Image.fromarray(by_pillow(encoded).astype(np.uint8)).resize(wanted, Image.Resampling.BOX)
    assert np.abs(pixels - np.asarray(full).astype(int)).mean() < 1.5


def test_pixels_are_counted_before_decoding():
    # 60 million pixels that compress to little; nothing but the header may be touched.
    encoded = encode(Image.new("L", (10_000, 6_000)), "PNG")
    header = read_header(encoded)
    with pytest.raises(ImageTooLargeError, match="10000 x 6000 = 60000000 pixels; at most 50000000"):
        check_pixels(header, 50_000_000)
    check_pixels(header, 60_000_000)


OTHERS = {
    "HTML": (b"<!DOCTYPE html><html><body>404</body></html>", "an HTML page"),
    "SVG": (b'<svg xmlns="http://www.w3.org/2000/svg"/>', "an SVG drawing"),
    "PDF": (b"%PDF-1.7 ...", "a PDF document"),
    "run-length coded BMP": (_run_length_coded(1), "run-length coded"),
    "TIFF": (encode(sample_image(), "TIFF"), "a TIFF image"),
    "AVIF": (b"\0\0\0\x20ftypavif\0\0\0\0avifmif1", "an AVIF image"),
    "HEIC": (b"\0\0\0\x20ftypheic\0\0\0\0heicmif1", "a HEIC image"),
    "noise": (bytes(range(200)), "not an image that can be read"),
    "a JPEG's first bytes": (b"\xff\xd8\xff\xe0", "the JPEG is cut short within its header"),
    "a data URL": (b"data:image/png;base64,iVBORw0KGgo", "a data URL"),
    "a GIF without frames": (b"GIF89a\x05\0\x05\0\0\0\0;", "the GIF has no frame"),
    "a JPEG without pixels": (
        encode(sample_image(), "JPEG").replace(b"\0\x28\0\x3c\3", b"\0\x28\0\0\3"),
        r"no pixels \(0 x 40\)",
    ),
    "a PNG without pixels": (png(8, 2, np.zeros((0, 0, 3), np.uint8)), r"no pixels \(0 x 0\)"),
    "a BMP without pixels": (b"BM" + bytes(12) + b"\x28" + bytes(60), "no pixels"),
    "nothing": (b"", "empty"),
}


@pytest.mark.parametrize("other", OTHERS)
def test_what_is_not_an_image_is_named(other):
    encoded, name = OTHERS[other]
    with pytest.raises(InvalidImageError, match=name):
        read_header(encoded)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "animated" not in kind and kind != "GIF"])
def test_a_file_cut_anywhere_is_an_error(kind):
    encoded = KINDS[kind]
    for length in range(0, len(encoded), 1 if len(encoded) < 2000 else 13):
        with pytest.raises(InvalidImageError):
            decode(encoded[:length])


@pytest.mark.parametrize("offset", [20, -2])
def test_a_png_with_a_wrong_checksum_is_an_error(offset):
    encoded = bytearray(KINDS["PNG"])
    encoded[encoded.index(b"IDAT" if offset > 0 else b"\0\0\0\0IEND") + offset] ^= 0xFF
    with pytest.raises(InvalidImageError, match="checksum"):
        decode(bytes(encoded))


def _with_chunk(added):
    encoded = KINDS["PNG"]
    return encoded[:33] + added + encoded[33:]


def test_what_a_png_holds_beside_its_pixels_is_not_looked_at():
    text = zlib.compress(bytes(1_000_000))
    bombs = b"".join(chunk(b"zTXt", b"%d\0\0" % index + text) for index in range(70))
    broken = chunk(b"iCCP", b"x")[:-4] + bytes(4)
    assert (decode(_with_chunk(bombs + broken + chunk(b"acTL"))) == decode(KINDS["PNG"])).all()


def test_a_header_is_not_looked_for_without_end():
    jpeg, gif = KINDS["JPEG"], KINDS["GIF"]
    with pytest.raises(InvalidImageError, match="no frame header"):
        read_header(jpeg[:2] + b"\xff\xfe\0\2" * 1_000_000 + jpeg[2:])
    with pytest.raises(InvalidImageError, match="no frame"):
        read_header(gif[:13] + bytes(1_000_000) + gif[13:])
    oriented = chunk(b"eXIf", b"MM\0*" + struct.pack(">IHHHIHHI", 8, 1, 0x0112, 3, 1, 6, 0, 0))
    assert read_header(_with_chunk(oriented)).orientation == 6
    assert read_header(_with_chunk(chunk(b"tEXt") * 1_000_000 + oriented)).orientation == 1


def scan_after_comment(jpeg: bytes, comment: bytes, times: int) -> bytes:
    """Repeat the last scan of a file so many times, each after a comment of these bytes."""
    last = jpeg.rindex(b"\xff\xda")
    between = b"\xff\xfe" + (len(comment) + 2).to_bytes(2, "big") + comment
    return jpeg[:last] + (between + jpeg[last:-2]) * times + jpeg[-2:]


@pytest.mark.parametrize("comment", [b"", b"\xff\xd9", b"\xff\xd9" * 20, b"\xff" * 5])
def test_scans_behind_what_looks_like_an_end_count(comment):
    for size in (None, (7, 5)):
        with pytest.raises(InvalidImageError, match="scans"):
            decode(scan_after_comment(KINDS["progressive JPEG"], comment, 101), size)


@given(st.binary(max_size=60) | st.lists(st.sampled_from([0xFF, 0xDA, 0xD9, 0, 1, 2, 0xD0]), max_size=60).map(bytes))
def test_scans_of_any_bytes_are_counted_to_an_end(content):
    for data in (content, memoryview(bytearray(b"x" + content))[1:]):
        decoding.check_scans(data)


def tiff(order, kind, form, orientation=6):
    value = struct.pack(order + form, orientation).ljust(4, b"\0")
    return (
        {"<": b"II*\0", ">": b"MM\0*"}[order] + struct.pack(f"{order}IHHHI", 8, 1, 0x0112, kind, 1) + value + bytes(4)
    )


XMP = b'<x:xmpmeta><rdf:Description tiff:Orientation="6"/></x:xmpmeta>'
_IN_XMP = struct.pack(">BBH", 0xFF, 0xE1, 31 + len(XMP)) + b"http://ns.adobe.com/xap/1.0/\0" + XMP
_EXIF = tiff("<", 3, "H")
_SEGMENTS = [b"\xff\xe1" + struct.pack(">H", 8 + len(part)) + b"Exif\0\0" + part for part in (_EXIF[:15], _EXIF[15:])]
_PROFILE = b"\nexif\n      38\n" + (b"Exif\0\0" + _EXIF).hex().encode() + b"\n"
_XMP_CHUNK = chunk(b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0" + XMP)
TURNED = {
    **{
        f"{kind}{order}": _with_chunk(chunk(b"eXIf", tiff(order, kind, form)))
        for order in "<>"
        for kind, form in ((1, "B"), (3, "H"), (4, "I"), (6, "b"), (8, "h"), (9, "i"))
    },
    "after a name": _with_chunk(chunk(b"eXIf", b"Exif\0\0" + _EXIF)),
    "after the image": KINDS["PNG"][:-12] + chunk(b"eXIf", _EXIF) + KINDS["PNG"][-12:],
    "XMP in JPEG": KINDS["JPEG"][:2] + _IN_XMP + KINDS["JPEG"][2:],
    "XMP beside broken EXIF in JPEG": KINDS["JPEG"][:2] + b"\xff\xe1\0\x0cExif\0\0II*\0" + _IN_XMP + KINDS["JPEG"][2:],
    "before the scan, in two": KINDS["JPEG"].replace(b"\xff\xda", b"".join((*_SEGMENTS, b"\xff\xda")), 1),
    "XMP in PNG": _with_chunk(_XMP_CHUNK),
    "XMP in WebP": encode(sample_image(), "WEBP", lossless=True, xmp=XMP),
    "XMP beside EXIF": _with_chunk(_XMP_CHUNK + chunk(b"eXIf", tiff("<", 3, "H", 3))),
    "XMP, packed": _with_chunk(chunk(b"iTXt", b"XML:com.adobe.xmp\0\1\0\0\0" + zlib.compress(XMP))),
    "XMP twice": _with_chunk(_XMP_CHUNK + chunk(b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0" + XMP.replace(b"6", b"3"))),
    "XMP of 0": _with_chunk(chunk(b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0" + XMP.replace(b"6", b"0") + XMP)),
    **{
        f"XMP beside {name}": _with_chunk(_XMP_CHUNK + chunk(b"eXIf", exif))
        for name, exif in {
            "none of a value": tiff("<", 3, "H", 3)[:14] + bytes(4) + tiff("<", 3, "H", 3)[18:],
            "an unknown type": tiff("<", 99, "H", 3),
            "a cut directory": _EXIF[:15],
            "a directory that is elsewhere": _EXIF[:4] + b"\xff" * 4 + _EXIF[8:],
            "values that are elsewhere": tiff("<", 3, "H", 3)[:14] + struct.pack("<II", 3, 4000) + bytes(4),
            "three values": _EXIF[:14] + struct.pack("<II4x3H", 3, 26, 8, 1, 1),
            "another beginning": tiff("<", 3, "H", 3).replace(b"II*\0", b"II\0*"),
        }.items()
    },
    "ImageMagick beside EXIF without": _with_chunk(
        chunk(b"tEXt", b"Raw profile type exif\0" + _PROFILE) + chunk(b"eXIf", _EXIF.replace(b"\x12\1", b"\x13\1"))
    ),
    "ImageMagick": _with_chunk(chunk(b"tEXt", b"Raw profile type exif\0" + _PROFILE)),
    "ImageMagick, packed": _with_chunk(chunk(b"zTXt", b"Raw profile type exif\0\0" + zlib.compress(_PROFILE))),
}


@pytest.mark.parametrize("stored", TURNED)
def test_an_orientation_is_read_wherever_pillow_reads_it(stored):
    if stored in ("XMP in JPEG", "XMP in WebP") and int(PIL.__version__.partition(".")[0]) < 12:
        pytest.skip("this Pillow does not read it")
    found, expected = decode(TURNED[stored]), by_pillow(TURNED[stored])
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() <= 1


@pytest.mark.parametrize("kind", ["JPEG", "CMYK JPEG", "PNG", "GIF", "BMP", "WebP"])
def test_a_file_that_contradicts_its_header_is_an_error(kind):
    other = encode(sample_image(50, 40), "WEBP" if kind == "WebP" else kind.split()[-1])
    with pytest.raises(InvalidImageError, match="contradicts"):
        decoding.decode(other, read_header(KINDS[kind]))


IMAGE = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (40, 60, 3), dtype=np.uint8))


def test_straightened_parts_begin_at_their_first_corner() -> None:
    corners = (5.0, 6.0, 25.0, 6.0, 25.0, 16.0, 5.0, 16.0)
    assert torch.equal(part_of(IMAGE, Region(0, 0, 20, 10, 0, corners)), IMAGE[6:16, 5:25])
    corners = (25.0, 16.0, 5.0, 16.0, 5.0, 6.0, 25.0, 6.0)
    upside_down = part_of(IMAGE, Region(0, 0, 20, 10, 0, corners))
    assert torch.equal(upside_down, IMAGE[6:17, 5:26].flip(0, 1)[:10, :20])


@pytest.mark.parametrize("quarters", [0, 1, 2, 3])
def test_parts_are_turned_by_quarters(quarters: int) -> None:
    part = part_of(IMAGE, Region(5, 6, 20, 10, quarters))
    assert part.is_contiguous()
    assert torch.equal(part_of(IMAGE, Region(0, 0, 60, 40)), IMAGE)
    assert torch.equal(part, torch.rot90(IMAGE[6:16, 5:25], quarters))


@pytest.mark.parametrize(
    "region",
    [
        Region(50, 0, 20, 10),
        Region(-1, 0, 1, 1),
        Region(0, 0, 0, 10),
        Region(0, 0, 1 << 20, 10, 0, (0.0, 0.0, 1.0, 0.0, 1.0, 1.0, 0.0, 1.0)),
        Region(0, 0, 9, 9, 0, (float("nan"),) * 8),
        Region(0, 0, 0, 9, 0, (0.0, 0.0, 1.0, 0.0, 1.0, 1.0, 0.0, 1.0)),
    ],
)
def test_what_lies_outside_or_is_too_large_is_refused(region: Region) -> None:
    with pytest.raises(InvalidImageError):
        part_of(IMAGE, region)


def test_a_decoder_places_each_region_behind_an_image_in_its_slot() -> None:
    model, image = open_model(parse_spec("resnet18:random"), Path("nowhere")), encode(Image.fromarray(IMAGE.numpy()))
    assert isinstance(model, PixelModel)
    regions = [(2, Region(5, 6, 20, 10)), (0, Region(0, 0, 30, 9, 3, (0.5, 1, 30, 2, 29, 11, 0, 10)))]
    tail, inbox = to_packet(regions), Inbox(1, 1 << 20)
    with contextlib.closing(Arena([(int(np.prod(model.input_shape)), 3)])) as arena:
        inbox.write(0, image, tail)
        decoder = Decoder(DecodePlan((model,), arena.pools, 1, 1 << 20, ("info", "text")), inbox, arena)
        job = Job(7, Kind.REGIONS, 0, 0, 0, len(image) + len(tail), 10**6, 10**6, tail=len(tail))
        assert decoder.answer(job) == Decoded(7, Status.PLACED, 60, 40)
        for slot, region in regions:
            part, placed = part_of(IMAGE, region), torch.empty(model.input_shape, dtype=torch.uint8)
            model.preprocess(part, placed, part.shape[1], part.shape[0])
            assert np.array_equal(arena.slot(0, slot), placed.numpy().reshape(-1))


def test_a_decoder_answers_at_once_for_what_waits_and_none_that_is_done_waits_for_a_large_one(monkeypatch):
    now_ms, sent = [0.0], []
    # Sizes of the images in each packet, none where no packet waits; a kilobyte takes a millisecond.
    packets = iter([[1, 1], [1], [], [1], [9], [1, 1, 1, 1], [1], []])

    def recv(_, flags):
        sizes = next(packets, [])
        if flags and not sizes:
            raise BlockingIOError
        return to_packet([Job(0, Kind.ENCODED, 0, 0, 0, 1200 * size, 1, 1) for size in sizes]) if sizes else b""

    def answer(_, job):
        now_ms[0] += job.size / 1000
        return Decoded(job.token, Status.PLACED)

    monkeypatch.setattr(Decoder, "answer", answer)
    monkeypatch.setattr(main.time, "monotonic", lambda: now_ms[0] / 1000)
    connection = Mock(recv=recv, send=lambda packet: sent.append(len(reader(Decoded)(packet))))
    main.decode_forever(DecodePlan((), (), 0, 0, 0, ("error", "text")), connection, None, None)
    assert sent == [3, 1, 1, 4, 1]
