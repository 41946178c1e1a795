"""JPEG files that a device may decode, and their layout in a slot in place of pixels.

    slot: │ size, width, height, where the first scan begins, orientation │ the file, as it came │

Owns: the choice of these files, and the layout. Must not know devices. The event loop reads the bytes before the first
scan, as a decoder process may. The slot's reader, another process, searches the rest, in time proportional to the file.
That reader gets bytes that were never decoded, and figures that they may contradict.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from app.images.header import Header, InvalidImageError, read_header

MOST_PIXELS = 1920 * 1088
"""Most pixels of an image that a device decodes, always at full size. Measured up to here."""
_MOST_SCANS = 16
"""Most scans: progressive files have about ten. A device passes over every pixel for each, while others wait."""
_MAX_SEGMENTS = 200
_HEAD = struct.Struct("<IIIIB3x")
_SEGMENT = struct.Struct(">BBH")
_FRAME = struct.Struct(">BHHB")
_BASELINE, _PROGRESSIVE, _END, _SCAN, _ADOBE = 0xC0, 0xC2, 0xD9, 0xDA, 0xEE
_FRAMES = frozenset({0xC0, 0xC1, 0xC2})
_PLAIN = frozenset({0xC4, 0xDB, 0xDD, 0xFE, *range(0xE0, 0xF0)})
"""Markers of tables, restart interval, comment, and application data."""

Bytes = npt.NDArray[np.uint8]


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
    """Return the offset of the first scan; 0 for an unusual file."""
    at, has_frame, is_ycbcr = 2, False, True
    for _ in range(_MAX_SEGMENTS):
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
