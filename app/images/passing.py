"""JPEG files that a device may decode, and how such a file lies in a slot in place of pixels.

    slot: │ size, width, height, orientation │ the file, as it came │

Owns: which files these are, and the layout. Must not know devices. What is looked at here is what a decoder process may
see of a file; the reader of a slot gets bytes that were never decoded, and a size that they may contradict.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from struct import unpack_from

import numpy as np
import numpy.typing as npt

from app.images.header import Header, InvalidImageError

MOST_PIXELS = 1920 * 1088
"""Of an image that a device decodes: in full, whatever the network sees of it. Up to here it was measured."""
_MOST_SCANS = 16
"""Progressive files have about ten, and a device passes over every pixel for each, while others wait for it."""
_MAX_SEGMENTS = 200
_HEAD = struct.Struct("<IIIB3x")
_BASELINE, _PROGRESSIVE, _END, _SCAN, _ADOBE = 0xC0, 0xC2, 0xD9, 0xDA, 0xEE
_FRAMES = [0xC0, 0xC1, 0xC2]
_PLAIN = frozenset({0xC4, 0xDB, 0xDD, 0xFE, *range(0xE0, 0xF0)})
"""Tables, restart interval, comment, applications' own."""

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class PassedFile:
    """A file that lay in a slot. `header`: what the decoder that passed it has read of it."""

    header: Header
    data: Bytes


def may_pass(data: memoryview, header: Header, room_bytes: int) -> bool:
    """Whether a file fits into a slot of so many bytes, and is of the kind that every device's decoder takes: baseline
    or progressive, 8 bits, grey or YCbCr, one frame, and with an end. All others are decoded on the host.
    """
    if header.format != "JPEG" or _HEAD.size + len(data) > room_bytes or header.width * header.height > MOST_PIXELS:
        return False
    try:
        first_scan = _scan_of_plain(data)
    except (struct.error, IndexError):
        return False
    if not first_scan:
        return False
    rest = np.frombuffer(data, np.uint8, offset=first_scan)
    markers = np.bincount(rest[1:][rest[:-1] == 0xFF], minlength=256)
    # A second frame would be another image, of whatever size. Within a scan no such pair of bytes occurs.
    return bool(markers[_SCAN] <= _MOST_SCANS and markers[_END] and not markers[_FRAMES].any())


def _scan_of_plain(view: memoryview) -> int:
    """Where the first scan begins; 0 for a file that is not as most are."""
    at, frame, is_ycbcr = 2, False, True
    for _ in range(_MAX_SEGMENTS):
        if view[at] != 0xFF:
            return 0
        marker = view[at + 1]
        (length,) = unpack_from(">H", view, at + 2)
        if marker == _SCAN:
            return at if frame else 0
        if marker in (_BASELINE, _PROGRESSIVE):
            precision, components = view[at + 4], view[at + 9]
            identifiers = bytes(view[at + 10 : at + 10 + 3 * components : 3])
            if frame or precision != 8 or not (components == 1 or (identifiers == b"\1\2\3" and is_ycbcr)):
                return 0
            frame = True
        elif marker not in _PLAIN:
            return 0
        elif marker == _ADOBE and bytes(view[at + 4 : at + 9]) == b"Adobe":
            is_ycbcr = view[at + 15] == 1
            if frame and not is_ycbcr:
                return 0
        at += 2 + length
    return 0


def write_file(slot: Bytes, data: memoryview, header: Header) -> None:
    """Put a file that `may_pass` into a slot."""
    _HEAD.pack_into(slot.data, 0, len(data), header.width, header.height, header.orientation)
    slot[_HEAD.size : _HEAD.size + len(data)] = np.frombuffer(data, np.uint8)


def read_file(slot: Bytes) -> PassedFile:
    """A copy of the file in a slot: who may write to the slot may do so at any time. Raises InvalidImageError."""
    size, width, height, orientation = _HEAD.unpack_from(slot.data, 0)
    if not 0 < size <= len(slot) - _HEAD.size or not 0 < width * height <= MOST_PIXELS or not 1 <= orientation <= 8:
        raise InvalidImageError("the slot holds no file")
    return PassedFile(Header("JPEG", width, height, orientation), slot[_HEAD.size : _HEAD.size + size].copy())
