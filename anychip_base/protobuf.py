"""Numbers in protocol buffers' wire format, in which ONNX files and gRPC's messages are written."""

from __future__ import annotations


def varint(data: memoryview, at: int) -> tuple[int, int]:
    """Read the varint that begins at `at`; return it and where the next byte is.

    Raises ValueError if it is longer than 64 bits need, IndexError if the data ends within it.
    """
    value = 0
    for shift in range(0, 70, 7):
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise ValueError


def head_of(number: int, size: int) -> bytes:
    """Encode the head of a field of so many bytes: its tag, for a number below 16, and its length."""
    head = bytearray([number << 3 | 2])
    while size > 0x7F:
        head.append(size & 0x7F | 0x80)
        size >>= 7
    head.append(size)
    return bytes(head)
