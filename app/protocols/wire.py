"""Tensors on the wire: bytes or lists of values to arrays, and back.

Owns: the Open Inference Protocol's datatypes, their layout (little-endian, row-major, no padding; a BYTES element is a
uint32 length and so many bytes) and the sentences for what does not fit. Must not know transports, models or services.
Nothing here trusts a size: shapes are multiplied as Python's whole numbers, which do not overflow, and compared with
the bytes that are there before any memory is taken.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from app.errors import ServiceError

Array = npt.NDArray[Any]
Buffer = bytes | memoryview

BYTES = "BYTES"
DATATYPES: dict[str, np.dtype[Any]] = {
    "BOOL": np.dtype(np.bool_),
    **{f"UINT{bits}": np.dtype(f"<u{bits // 8}") for bits in (8, 16, 32, 64)},
    **{f"INT{bits}": np.dtype(f"<i{bits // 8}") for bits in (8, 16, 32, 64)},
    **{f"FP{bits}": np.dtype(f"<f{bits // 8}") for bits in (16, 32, 64)},
}
"""All but BYTES."""

_LENGTH = struct.Struct("<I")
_KINDS = {"b": "b", "u": "iu", "i": "iu", "f": "iuf"}  # What NumPy makes of fitting values, by the datatype's kind.


def bad(message: str) -> ServiceError:
    """INVALID_REQUEST with this sentence."""
    return ServiceError("INVALID_REQUEST", message)


def size_of(shape: Sequence[int]) -> int:
    """Elements of a tensor of this shape."""
    return prod(shape)


def from_bytes(name: str, datatype: str, shape: Sequence[int], content: Buffer) -> Array:
    """A tensor from its bytes, without copying them: read-only. Raises INVALID_REQUEST when they are not as many."""
    dtype = DATATYPES[datatype]
    wanted = size_of(shape) * dtype.itemsize
    if len(content) != wanted:
        raise bad(f"{name} has {len(content)} bytes, but {datatype} {list(shape)} takes {wanted}")
    if datatype == "BOOL":  # A byte other than 0 and 1 is no truth value for what computes with it.
        return np.asarray(np.frombuffer(content, np.uint8) != 0).reshape(shape)
    array: Array = np.frombuffer(content, dtype)
    return array.reshape(shape)


def from_values(name: str, datatype: str, shape: Sequence[int], values: Any) -> Array:
    """A tensor from a list of its values, nested or flat. Raises INVALID_REQUEST."""
    dtype = DATATYPES[datatype]
    try:
        array = np.asarray(values)
    except (ValueError, OverflowError):  # Lists of different lengths.
        raise bad(f"the data of {name} is no rectangular list of values") from None
    if array.dtype.kind not in _KINDS[dtype.kind] and array.size:
        raise bad(f"the data of {name} must be {datatype} values only")
    if array.size != size_of(shape):
        raise bad(f"{name} has {array.size} values, but its shape {list(shape)} holds {size_of(shape)}")
    if dtype.kind in "iu" and array.size:
        limits = np.iinfo(dtype)
        if int(array.min()) < limits.min or int(array.max()) > limits.max:
            raise bad(f"the data of {name} has values beyond {datatype}")
    with np.errstate(over="ignore"):  # Becomes infinity, which is looked for where it matters.
        return array.astype(dtype, copy=False).reshape(shape)


def elements(name: str, count: int, content: Buffer) -> list[memoryview]:
    """The elements of a BYTES tensor: views of `content`. Raises INVALID_REQUEST when they are not exactly `count`."""
    view, at = memoryview(content), 0
    found: list[memoryview] = []
    # A length takes four bytes at least: a shape that lies cannot make this run longer than the content.
    while at < len(view):
        if len(found) == count:
            raise bad(f"{name} goes on after its {count} elements")
        start = at + _LENGTH.size
        end = start + _LENGTH.unpack_from(view, at)[0] if start <= len(view) else len(view) + 1
        if end > len(view):
            raise bad(f"element {len(found)} of {name} ends beyond its data")
        found.append(view[start:end])
        at = end
    if len(found) != count:
        raise bad(f"{name} has {len(found)} elements, but its shape holds {count}")
    return found


def to_bytes(array: Array | Sequence[bytes]) -> bytes:
    """A tensor's bytes as the wire wants them; of BYTES, a sequence of its elements."""
    if isinstance(array, np.ndarray):
        return np.ascontiguousarray(array, array.dtype.newbyteorder("<")).tobytes()
    return b"".join(part for element in array for part in (_LENGTH.pack(len(element)), element))


def datatype_of(array: Array | Sequence[bytes]) -> str:
    """The protocol's name for what an array holds. Raises KeyError for types it does not have."""
    if not isinstance(array, np.ndarray):
        return BYTES
    return _NAMES[array.dtype.newbyteorder("<")]


_NAMES = {dtype.newbyteorder("<"): name for name, dtype in DATATYPES.items()}


def stacked(rows: Iterable[Array]) -> Array:
    """One tensor of a batch's rows; rows that are shorter in some dimension are filled up with zeros."""
    arrays = list(rows)
    if len({array.shape for array in arrays}) == 1:
        return np.stack(arrays)
    longest = tuple(max(lengths) for lengths in zip(*(array.shape for array in arrays), strict=True))
    batch = np.zeros((len(arrays), *longest), arrays[0].dtype)
    for row, array in zip(batch, arrays, strict=True):
        row[tuple(slice(length) for length in array.shape)] = array
    return batch
