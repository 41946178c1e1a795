"""Headers of encoded images: format, size, orientation; and the JPEG files that a device may decode.

Formats are told by their first bytes, never by name or content type. Nothing is decompressed here, so that the refusal
of an image too large costs only its header. Must not know decoders, models, devices or HTTP.

    slot: │ size, width, height, where the first scan begins, orientation │ a file for a device, as it came │

The event loop reads the bytes before the first scan. The slot's reader, another process, searches the rest, in time
proportional to the file; it gets bytes that were never decoded, and figures that they may contradict.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from struct import unpack_from
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

Format = Literal["JPEG", "PNG", "WebP", "BMP", "GIF"]

_MAX_SEGMENTS = 2_000
"""Most segments, chunks or directory entries before a size or an orientation. Real files have tens. It is bounded
because this runs in the event loop, and a hostile file of 20 MB holds millions."""
_MAX_EXIF = 32  # Segments that are joined, which copies them in the event loop.

_MAX_BLOCKS = 20_000
"""Most blocks of a GIF, of which a few hundred bytes of text each can make thousands."""

_BMP_COMPRESSIONS = (0, 3, 6)
"""Compressions: none, and the colours' bit masks without (BI_BITFIELDS) and with alpha (BI_ALPHABITFIELDS)."""

_NUMBERS = {3: "H", 4: "I", 5: "II", 6: "b", 8: "h", 9: "i", 10: "ii", 11: "f", 12: "d", 13: "I", 16: "Q"}
"""TIFF types of an orientation, as Pillow reads them: SHORT, which EXIF says, LONG, which some cameras write, and all
other numbers, fractions too. Pillow takes a BYTE for text, and does not turn the image."""
_SIZES = {1: 1, 2: 1, 7: 1, **{kind: struct.calcsize(f"<{form}") for kind, form in _NUMBERS.items()}}
"""Bytes of a value of each TIFF type; of others Pillow reads nothing."""
_EXIF = b"Exif\0\0"
XMP = b"http://ns.adobe.com/xap/1.0/\0"
_XMP_TEXT = b"XML:com.adobe.xmp\0"
_XMP_ORIENTATION = re.compile(rb'tiff:Orientation(?:="|>)([0-9])')
_PROFILES = {b"tEXt": b"Raw profile type exif\0", b"zTXt": b"Raw profile type exif\0\0"}
"""EXIF data in hexadecimal, as ImageMagick writes them into a PNG; zTXt has a byte for its compression."""
_MAX_PROFILE, _MAX_XMP = 1 << 17, 1 << 18
_HIERARCHICAL = frozenset({0xC5, 0xC6, 0xC7, 0xCD, 0xCE, 0xCF})
_SEGMENT = struct.Struct(">BBH")
_START_OF_FRAME = frozenset({*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC})
_WITHOUT_LENGTH = frozenset({0x00, 0x01, *range(0xD0, 0xD9)})

MOST_PIXELS = 1920 * 1088
"""Most pixels of an image that a device decodes, always at full size. Measured up to here."""
_MOST_SCANS = 16
"""Most scans: progressive files have about ten. A device passes over every pixel for each, while others wait."""
_MAX_PLAIN_SEGMENTS = 200
_HEAD = struct.Struct("<IIIIB3x")
_FRAME = struct.Struct(">BHHB")
_BASELINE, _PROGRESSIVE, _END, _SCAN, _ADOBE = 0xC0, 0xC2, 0xD9, 0xDA, 0xEE
_FRAMES = frozenset({0xC0, 0xC1, 0xC2})
_PLAIN = frozenset({0xC4, 0xDB, 0xDD, 0xFE, *range(0xE0, 0xF0)})
"""Markers of tables, restart interval, comment, and application data."""
_APP1 = 0xE1
_TABLES = _PLAIN - {_APP1}

Bytes = npt.NDArray[np.uint8]

# Files sent by mistake, by their first bytes (lower case, after white space); ISO media carry a brand at byte 8.
_OTHERS = {
    "an HTML page": (b"<!doctype html", b"<html"),
    "an SVG drawing": (b"<svg",),
    "an XML document": (b"<?xml",),
    "a PDF document": (b"%pdf-",),
    "a TIFF image": (b"ii*\0", b"mm\0*"),
    "a JPEG 2000 image": (b"\0\0\0\x0cjp  ",),
    "a JPEG XL image": (b"\0\0\0\x0cjxl ", b"\xff\n"),
    "an icon": (b"\0\0\1\0",),
    "a Photoshop document": (b"8bps",),
    "a ZIP archive": (b"pk\3\4",),
    "a gzip file": (b"\x1f\x8b",),
    "a data URL, not the bytes it encodes": (b"data:",),
    "base64 text, not the bytes it encodes": (b"/9j/", b"ivborw0kgg"),
    "JSON": (b"{", b"["),
}
_BRANDS = {
    "an AVIF image": (b"avif", b"avis"),
    "a HEIC image": (b"heic", b"heix"),
    "a HEIF image": (b"mif1",),
}

_BINARY = re.compile(rb"[\0\r\n]")  # Bytes that `curl -d @cat.jpg` leaves out.
_BEGINNINGS = (b"\xff\xd8\xff", b"\x89PNG", b"GIF8", b"BM", b"RIFF")
_LEAST_BYTES = 64
_BINARY_WITHIN = 4096
"""Bytes within which a header of every format has a zero or a line end: in lengths, positions, signatures."""


class ImageError(Exception):
    """The encoded image cannot be used; the message is one plain sentence for the client."""


class InvalidImageError(ImageError):
    """The data is not an image, damaged, cut short, or of a kind that is not read."""


class ImageTooLargeError(ImageError):
    """The image has more pixels than the limit."""


class Header(msgspec.Struct, frozen=True):
    """Header of an image. `width` and `height` are in pixels as displayed: `orientation` is applied.

    `orientation` is EXIF's, 1 to 8.
    """

    format: Format
    width: int
    height: int
    orientation: int = 1

    @property
    def stored_size(self) -> tuple[int, int]:
        """Return (width, height) as the file stores its pixels."""
        return self.turn(self.width, self.height)

    def turn(self, width: int, height: int) -> tuple[int, int]:
        """Convert a displayed (width, height) to the stored one, or the other way round."""
        return (height, width) if self.orientation >= 5 else (width, height)


_Stored = tuple[int, int, int]  # Width and height as stored, orientation.


def has_lost_bytes(data: bytes | bytearray | memoryview) -> bool:
    """Return True if a binary body has none of the bytes that every image has and `curl -d @cat.jpg` leaves out."""
    begin = memoryview(data)[:_BINARY_WITHIN]
    return _BINARY.search(begin) is None and not bytes(begin).isascii()


def begins_as_image(data: bytes | bytearray | memoryview) -> bool:
    """Return True if the first bytes are those of a usual format."""
    return bytes(data[:4]).startswith(_BEGINNINGS)


def read_header(data: bytes | bytearray | memoryview) -> Header:
    """Return the header of an encoded image; costs microseconds. Raises InvalidImageError.

    The size is the one the decoder will find: for a GIF that of the canvas, widened to its first frame.
    """
    view = memoryview(data)
    start = bytes(view[:64])
    if 0 not in start and len(view) >= _LEAST_BYTES and begins_as_image(start) and has_lost_bytes(view):
        raise InvalidImageError("the image has lost its zeros and line ends, as curl -d sends it: use --data-binary")
    format_, read = _reader(start)
    try:
        width, height, orientation = read(view)
    except (struct.error, IndexError):
        raise InvalidImageError(f"the {format_} is cut short within its header") from None
    if not (width and height):
        raise InvalidImageError(f"the {format_} has no pixels ({width} x {height})")
    if orientation >= 5:
        width, height = height, width
    return Header(format_, width, height, orientation)


def check_pixels(header: Header, limit: int) -> None:
    """Raise ImageTooLargeError if the image has more than `limit` pixels."""
    pixels = header.width * header.height
    if pixels > limit:
        size = f"{header.width} x {header.height} = {pixels}"
        raise ImageTooLargeError(f"the image has {size} pixels; at most {limit} are read")


def _read_jpeg(view: memoryview) -> _Stored:
    """Read ISO/IEC 10918-1, annex B: segments up to the first scan; EXIF is in APP1 segments, and so is XMP."""
    at, xmp, size = 2, view[:0], (0, 0)
    exif: list[memoryview] = []
    for _ in range(_MAX_SEGMENTS):
        begin, marker, length = _SEGMENT.unpack_from(view, at)
        if marker in _TABLES and begin == 0xFF:  # Asked first: most segments are of these kinds.
            at += 2 + length
            continue
        if begin != 0xFF or marker == 0xFF:  # Junk and fill bytes between segments: every decoder passes them.
            at += 1
            continue
        if marker in (_SCAN, _END):
            break
        if marker in _WITHOUT_LENGTH:
            at += 2
            continue
        if marker == _APP1:
            segment = view[at + 4 : at + 2 + length]
            # Pillow joins several, as EXIF of more than 64 kB has them.
            if segment[:6] == _EXIF and len(exif) < _MAX_EXIF:
                exif.append(segment[6:] if exif else segment)
            elif segment[: len(XMP)] == XMP:
                xmp = segment
        elif marker in _START_OF_FRAME and not any(size):
            bits, height, width = unpack_from(">BHH", view, at + 4)
            if marker in _HIERARCHICAL:
                raise InvalidImageError("the JPEG is a hierarchical one, which is not read; save it as a plain one")
            if bits not in (8, 12, 16):
                raise InvalidImageError("the JPEG is broken: its frame header makes no sense")
            if bits != 8:
                raise InvalidImageError(f"the JPEG has {bits} bits a colour; those of 8 are read: save it with 8")
            size = width, height
        at += 2 + length
    if not any(size):
        raise InvalidImageError("the JPEG has no frame header before its image data")
    if not (exif or xmp):
        return *size, 1
    joined = exif[0] if len(exif) == 1 else memoryview(b"".join(exif))
    return *size, exif_orientation(joined) or _xmp_orientation(xmp) or 1


def _read_png(view: memoryview) -> _Stored:
    """Read PNG, third edition, section 5: all chunks, as texts and eXIf may also come after the image data."""
    length, kind, width, height = unpack_from(">I4sII", view, 8)
    if (length, kind) != (13, b"IHDR"):
        raise InvalidImageError("the PNG does not start with its header chunk")
    at, exif, profile, xmp, is_packed = 33, -1, view[:0], view[:0], False
    for _ in range(_MAX_SEGMENTS):
        if at + 8 > len(view):
            break
        length, kind = unpack_from(">I4s", view, at)
        content = view[at + 8 : at + 8 + length]
        key = _PROFILES.get(kind, b"")
        if kind == b"eXIf":
            exif = exif_orientation(content)
        elif key and content[: len(key)] == key:  # The last one counts, and is read alone: it takes time.
            profile, is_packed = content[len(key) :], kind == b"zTXt"
        elif kind == b"iTXt" and content[: len(_XMP_TEXT)] == _XMP_TEXT:
            xmp = content[len(_XMP_TEXT) :]
        at += 12 + length
    stated = _profile_orientation(profile, is_packed) if exif < 0 else exif
    return width, height, stated or _xmp_orientation(_unpacked(xmp)) or 1


def _read_webp(view: memoryview) -> _Stored:
    """Read RFC 9649: a lossy (VP8), lossless (VP8L) or extended (VP8X) image in a RIFF container."""
    (riff_size,) = unpack_from("<I", view, 4)
    if len(view) < 8 + riff_size:
        raise InvalidImageError("the WebP is cut short")
    kind = bytes(view[12:16])
    if kind == b"VP8X":
        flags, width, width_high, height, height_high = unpack_from("<B3xHBHB", view, 20)
        orientation = _webp_orientation(view) if flags & 0x0C else 1
        return 1 + width + (width_high << 16), 1 + height + (height_high << 16), orientation
    if kind == b"VP8L" and view[20] == 0x2F:
        (bits,) = unpack_from("<I", view, 21)
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF), 1
    if kind == b"VP8 " and bytes(view[23:26]) == b"\x9d\x01\x2a":
        width, height = unpack_from("<HH", view, 26)
        return width & 0x3FFF, height & 0x3FFF, 1
    raise InvalidImageError("the WebP does not start with an image")


def _webp_orientation(view: memoryview) -> int:
    at, exif, xmp = 12, -1, -1
    for _ in range(_MAX_SEGMENTS):
        if at + 8 > len(view):
            break
        kind, size = unpack_from("<4sI", view, at)
        if kind == b"EXIF":
            exif = exif_orientation(view[at + 8 : at + 8 + size]) if exif < 0 else exif
        elif kind == b"XMP ":
            xmp = _xmp_orientation(view[at + 8 : at + 8 + size]) if xmp < 0 else xmp
        at += 8 + size + size % 2
    return max(exif, 0) or max(xmp, 0) or 1


def _read_bmp(view: memoryview) -> _Stored:
    """Read BITMAPCOREHEADER (12 bytes) or one of BITMAPINFOHEADER's line; a negative height means top row first.

    Run-length coding is refused: Pillow decodes it in Python, so that a file of 1 KB occupies a decoder for seconds.
    """
    (header_size,) = unpack_from("<I", view, 14)
    compression = unpack_from("<I", view, 30)[0] if header_size >= 40 else 0
    if compression not in _BMP_COMPRESSIONS:
        raise InvalidImageError("the BMP is run-length coded or otherwise compressed, which is not read; save it plain")
    width, height = unpack_from("<HH" if header_size == 12 else "<Ii", view, 18)
    return width, abs(height), 1


def _read_gif(view: memoryview) -> _Stored:
    """Read GIF89a: the canvas, and the first frame, which reaches beyond it in some files."""
    width, height, flags = unpack_from("<HHB", view, 6)
    at = 13 + (3 << (flags & 7) + 1 if flags & 0x80 else 0)
    within_extension = False
    for _ in range(_MAX_BLOCKS):
        byte = view[at]
        if within_extension:
            at += 1 + byte
            within_extension = byte != 0
        elif byte == 0x21:
            at += 2
            within_extension = True
        elif byte == 0x2C:
            left, top, frame_width, frame_height = unpack_from("<4H", view, at + 1)
            return max(width, left + frame_width), max(height, top + frame_height), 1
        elif byte == 0x3B:
            break
        else:
            at += 1
    raise InvalidImageError("the GIF has no frame")


def exif_orientation(exif: memoryview) -> int:
    """Return the orientation tag of EXIF data (a TIFF directory), 0 if Pillow finds none, 1 if it makes no sense."""
    for _ in range(2):
        exif = exif[6:] if exif[:6] == _EXIF else exif
    order = {b"II*\0": "<", b"II\0*": "<", b"MM\0*": ">", b"MM*\0": ">"}.get(bytes(exif[:4]))
    if order is None or len(exif) < 8:  # Pillow then reads no XMP either.
        return min(len(exif), 1)
    total, seen = 0, set[int]()
    try:
        (directory,) = unpack_from(f"{order}I", exif, 4)
        (count,) = unpack_from(f"{order}H", exif, directory)
        for entry in range(min(count, _MAX_SEGMENTS)):
            at = directory + 2 + 12 * entry
            tag, kind, number, place = unpack_from(f"{order}HHII", exif, at)
            size = number * _SIZES.get(kind, 0) * (tag not in seen)
            total += size if size > 4 else 0
            if not size or (size > 4 and total > len(exif)):
                continue
            if size > 4 and place + size > len(exif):  # Pillow reads no further, whatever follows.
                break
            seen.add(tag)
            if tag == 0x0112:
                form = struct.Struct(f"{order}{_NUMBERS.get(kind, 'x')}")
                found = form.unpack_from(exif, place if size > 4 else at + 8)
                value, divisor = (*found, 1, 1)[:2] if found else (0, 1)
                return next((each for each in range(1, 9) if each * divisor == value), 1)
    except struct.error:
        pass
    return 0


def _xmp_orientation(xmp: memoryview) -> int:
    """Return the orientation that XMP data state, 0 if there is none; it counts where EXIF states none."""
    found = _XMP_ORIENTATION.search(xmp[:_MAX_XMP])
    return (int(found[1]) if found[1] in b"12345678" else 1) if found else 0


def _unpacked(text: memoryview) -> memoryview:
    """Return the content of a PNG's iTXt chunk behind its key: it may be compressed."""
    if not text or not text[0]:
        return text
    try:
        packed = bytes(text[2:_MAX_XMP]).split(b"\0", 2)[2] if text[1] == 0 else b""
        return memoryview(zlib.decompressobj().decompress(packed, _MAX_XMP))
    except (zlib.error, IndexError):
        return text[:0]


def _profile_orientation(profile: memoryview, is_packed: bool) -> int:
    """Return the orientation of EXIF data in hexadecimal, after lines with their name and length."""
    try:
        text = zlib.decompressobj().decompress(profile, _MAX_PROFILE) if is_packed else bytes(profile[:_MAX_PROFILE])
        digits = b"".join(text.split(b"\n")[3:])
        return exif_orientation(memoryview(bytes.fromhex(digits[: len(digits) // 2 * 2].decode("latin-1"))))
    except (zlib.error, ValueError):
        return 0


_Reader = Callable[[memoryview], _Stored]
_READERS: tuple[tuple[bytes, Format, _Reader], ...] = (
    (b"\xff\xd8\xff", "JPEG", _read_jpeg),
    (b"\x89PNG\r\n\x1a\n", "PNG", _read_png),
    (b"RIFF", "WebP", _read_webp),
    (b"GIF87a", "GIF", _read_gif),
    (b"GIF89a", "GIF", _read_gif),
    (b"BM", "BMP", _read_bmp),
)


def _reader(start: bytes) -> tuple[Format, _Reader]:
    """Return the format and reader for these first bytes. Raises InvalidImageError, naming what it looks like."""
    for magic, format_, read in _READERS:
        if start.startswith(magic) and (format_ != "WebP" or start[8:12] == b"WEBP"):
            return format_, read
    if not start:
        raise InvalidImageError("the image is empty")
    readable = "JPEG, PNG, WebP, BMP and GIF"
    text = start.removeprefix(b"\xef\xbb\xbf").lstrip().lower()
    begin, known = (start[8:12], _BRANDS) if start[4:8] == b"ftyp" else (text, _OTHERS)
    if kind := next((name for name, magics in known.items() if begin.startswith(magics)), None):
        raise InvalidImageError(f"this is {kind}; {readable} are read")
    raise InvalidImageError(f"this is not an image that can be read ({readable})")


@dataclass(frozen=True, slots=True)
class PassedFile:
    """File from a slot. `header`: as read by the process that passed it."""

    header: Header
    data: Bytes


def plain_header(view: memoryview, room_bytes: int) -> tuple[Header, int] | None:
    """Return the header of a file that fits into a slot of so many bytes, and the offset of its first scan. Up to that
    scan the file must be of the kind that every device's decoder takes: baseline or progressive, 8 bits, grey or YCbCr,
    one frame. Return None for others; the host decodes them.
    """
    if _HEAD.size + len(view) > room_bytes or bytes(view[:2]) != b"\xff\xd8":
        return None
    try:
        first_scan, header = _first_scan(view), read_header(view)
    except (struct.error, IndexError, InvalidImageError):
        return None
    return (header, first_scan) if first_scan and header.width * header.height <= MOST_PIXELS else None


def _first_scan(view: memoryview) -> int:
    """Return the offset of a JPEG file's first scan.

    Returns 0 for a file that is not plain: 8 bits, grey or YCbCr. Raises struct.error if the file is cut short.
    """
    at, has_frame, is_ycbcr = 2, False, True
    for _ in range(_MAX_PLAIN_SEGMENTS):
        mark, marker, length = _SEGMENT.unpack_from(view, at)
        if mark != 0xFF:
            break
        if marker == _SCAN:
            return at if has_frame else 0
        if marker in (_BASELINE, _PROGRESSIVE):
            precision, _, _, components = _FRAME.unpack_from(view, at + 4)
            identifiers = bytes(view[at + 10 : at + 10 + 3 * components : 3])
            if has_frame or precision != 8 or not (components == 1 or (identifiers == b"\1\2\3" and is_ycbcr)):
                break
            has_frame = True
        elif marker not in _PLAIN:
            break
        elif marker == _ADOBE and bytes(view[at + 4 : at + 9]) == b"Adobe":
            is_ycbcr = view[at + 15] == 1
            if has_frame and not is_ycbcr:
                break
        at += 2 + length
    return 0


def write_file(slot: Bytes, data: memoryview, header: Header, first_scan: int) -> None:
    """Put a file, as `plain_header` has read it, into a slot."""
    _HEAD.pack_into(slot.data, 0, len(data), header.width, header.height, first_scan, header.orientation)
    slot[_HEAD.size : _HEAD.size + len(data)] = np.frombuffer(data, np.uint8)


def read_file(slot: Bytes) -> PassedFile:
    """Return a copy of the file in a slot: the writer of the slot may change it at any time.

    Raises InvalidImageError if there is none, or if the file is unusual after the first scan: a second frame, no end,
    or very many scans.
    """
    size, width, height, first_scan, orientation = _HEAD.unpack_from(slot.data, 0)
    if not 0 < size <= len(slot) - _HEAD.size or not 0 < width * height <= MOST_PIXELS or not 1 <= orientation <= 8:
        raise InvalidImageError("the slot holds no file")
    data = slot[_HEAD.size : _HEAD.size + size].copy()
    # Markers: within a scan a byte of 0xFF is followed by 0, which is no marker.
    rest = data[first_scan:]
    is_marked = rest[:-1] == 0xFF
    is_marked &= rest[1:] != 0
    marks = rest[1:].compress(is_marked).tobytes()
    # A second frame would be another image, of whatever size.
    if marks.count(_SCAN) > _MOST_SCANS or _END not in marks or not _FRAMES.isdisjoint(marks):
        raise InvalidImageError("the file is not as most are")
    return PassedFile(Header("JPEG", width, height, orientation), data)
