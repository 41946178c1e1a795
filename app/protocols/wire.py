"""Inference requests and answers as tensors by name, and tensors as bytes or lists of values, for both transports.

Bytes are little-endian, row-major, without padding; a BYTES element is a uint32 length and so many bytes. Must not
import anything large: app.protocols.documents runs in a small process. Nothing here trusts a size: shapes are
multiplied as Python's whole numbers, and compared with the bytes that are there before any memory is taken.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from app.errors import invalid_request

Array = npt.NDArray[Any]
Buffer = bytes | bytearray | memoryview

BYTES = "BYTES"
DATATYPES: dict[str, np.dtype[Any]] = {
    "BOOL": np.dtype(np.bool_),
    **{f"UINT{bits}": np.dtype(f"<u{bits // 8}") for bits in (8, 16, 32, 64)},
    **{f"INT{bits}": np.dtype(f"<i{bits // 8}") for bits in (8, 16, 32, 64)},
    **{f"FP{bits}": np.dtype(f"<f{bits // 8}") for bits in (16, 32, 64)},
}
_NAMES = {dtype.newbyteorder("<"): name for name, dtype in DATATYPES.items()}

_LENGTH = struct.Struct("<I")
_PIECE_BYTES = 1024 * 1024
_TYPES: dict[str, set[type]] = {"b": {bool}, "u": {int, float}, "i": {int, float}, "f": {int, float}}
"""Types of fitting values in JSON, by the datatype's kind. JSON has one kind of number: some clients write 1 as 1.0."""
_MOST_DEPTH = 8
_MOST_ELEMENTS = 2**60  # int64 counts so many of eight bytes each.
IMAGE, PIXELS, INPUT, PREDICTIONS = "image", "pixels", "input", "predictions"
"""Names of the tensors of every model of images."""
MAX_TENSORS = 256
"""Most inputs, outputs and parameters of each that a request may name; models have a handful."""
_MOST_DIMENSIONS = 8
_ID = re.compile(r"[^\x00-\x1f\x7f]{0,256}")


@dataclass(frozen=True, slots=True)
class InputTensor:
    """An input as bytes, `content`; one of BYTES may also be given as its `elements`."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    content: Buffer = b""
    elements: Sequence[Buffer] | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)

    def array(self) -> Array:
        """Make a tensor of its content, as `from_bytes` does. Raises INVALID_REQUEST."""
        return from_bytes(self.name, self.datatype, self.shape, self.content)


@dataclass(frozen=True, slots=True)
class RequestedOutput:
    """An output as the request names it; `classification`: top-k as labels; 0: the raw tensor."""

    name: str
    classification: int = 0
    parameters: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class InferenceRequest:
    """An inference request. No `outputs`: all of them."""

    inputs: Sequence[InputTensor]
    outputs: Sequence[RequestedOutput] = ()
    parameters: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class OutputTensor:
    """An output of the answer; `data` of BYTES are its elements."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: npt.NDArray[Any] | list[bytes]


@dataclass(frozen=True, slots=True)
class InferenceResponse:
    """The outputs in the order of the request; `made_by`: the device and weights that computed them."""

    outputs: list[OutputTensor]
    made_by: dict[str, str | bool]

    @property
    def data_bytes(self) -> int:
        """Size of all arrays: the work to write the answer."""
        return sum(output.data.nbytes for output in self.outputs if isinstance(output.data, np.ndarray))


def checked_id(given: Any) -> str:
    """Return the client's name for its request. Raises INVALID_REQUEST."""
    if not isinstance(given, str) or not _ID.fullmatch(given):
        raise invalid_request("the id must be a string of at most 256 characters, none of them a control character")
    return given


def checked_shape(name: str, shape: Any) -> tuple[int, ...]:
    """Return a shape that a tensor can have. Raises INVALID_REQUEST."""
    if not isinstance(shape, Sequence) or isinstance(shape, str | bytes) or len(shape) > _MOST_DIMENSIONS:
        raise invalid_request(f"the shape of {name} must be a list of at most {_MOST_DIMENSIONS} dimensions")
    if any(type(length) is not int or not 0 <= length < 2**63 for length in shape):
        raise invalid_request(f"the shape of {name} must be of whole numbers from 0, not {list(shape)!r}")
    size_of(shape)
    return tuple(shape)


def checked_count(what: str, count: int) -> None:
    """Raise INVALID_REQUEST for more inputs, outputs or parameters than a request may name."""
    if count > MAX_TENSORS:
        raise invalid_request(f"{count} {what} are more than the {MAX_TENSORS} a request may name")


def size_of(shape: Sequence[int]) -> int:
    """Return the elements of a tensor of this shape. Raises INVALID_REQUEST for more than any tensor has.

    NumPy multiplies lengths as int64, also where another of them is 0.
    """
    if prod(length for length in shape if length) >= _MOST_ELEMENTS:
        raise invalid_request(f"a tensor of the shape {list(shape)} would be larger than any memory")
    return prod(shape)


def _dtype(name: str, datatype: str) -> np.dtype[Any]:
    if datatype not in DATATYPES:
        raise invalid_request(f"the input {name} cannot be {datatype!r}; there is {', '.join(DATATYPES)}")
    return DATATYPES[datatype]


def from_bytes(name: str, datatype: str, shape: Sequence[int], content: Buffer) -> Array:
    """Make a tensor of its bytes, read-only; only BOOL is copied. Raises INVALID_REQUEST if they are not as many."""
    dtype = _dtype(name, datatype)
    wanted = size_of(shape) * dtype.itemsize
    if len(content) != wanted:
        raise invalid_request(f"{name} has {len(content)} bytes, but {datatype} {list(shape)} takes {wanted}")
    if datatype == "BOOL":  # A byte other than 0 and 1 is no valid truth value.
        return np.asarray(np.frombuffer(content, np.uint8) != 0).reshape(shape)
    array: Array = np.frombuffer(content, dtype)
    return array.reshape(shape)


def from_values(name: str, datatype: str, shape: Sequence[int], values: list[Any]) -> Array:
    """Make a tensor of a list of its values, nested as its shape or flat. Raises INVALID_REQUEST.

    NumPy sees the values only after all of them are known to be numbers: of one long string among many it would make an
    array of as many strings of that length.
    """
    dtype = _dtype(name, datatype)
    flat = _flat(name, shape, values)
    if not set(map(type, flat)) <= _TYPES[dtype.kind]:
        raise invalid_request(f"the data of {name} must be {datatype} values only")
    if len(flat) != size_of(shape):
        raise invalid_request(f"{name} has {len(flat)} values, but its shape {list(shape)} holds {size_of(shape)}")
    if dtype.kind in "iu" and flat:
        if float in set(map(type, flat)):
            if not all(type(value) is int or value.is_integer() for value in flat):
                raise invalid_request(f"the data of {name} must be {datatype} values only")
            flat = list(map(int, flat))
        limits = np.iinfo(dtype)
        if min(flat) < limits.min or max(flat) > limits.max:
            raise invalid_request(f"the data of {name} has values beyond {datatype}")
    with np.errstate(over="raise"):
        try:
            return np.array(flat, np.float64 if dtype.kind == "f" else dtype).astype(dtype, copy=False).reshape(shape)
        except (OverflowError, FloatingPointError):
            raise invalid_request(f"the data of {name} has values beyond {datatype}") from None


def _flat(name: str, shape: Sequence[int], values: list[Any]) -> list[Any]:
    """Flatten lists that are nested as the shape says, to its end or less deep. Raises INVALID_REQUEST."""
    lengths = [len(values)]
    for _ in range(_MOST_DEPTH):
        if not values or type(values[0]) is not list:
            # Rows of another length would be read on in the next row. Axes of length 1 change no number's place.
            rows, wanted = ([length for length in each if length != 1] for each in (lengths, shape))
            if any(one != other for one, other in zip(rows[:-1], wanted, strict=False)):
                raise invalid_request(f"the data of {name} is nested as {lengths}, but its shape is {list(shape)}")
            return values
        if set(map(type, values)) != {list} or len(set(map(len, values))) > 1:
            raise invalid_request(f"the data of {name} is no rectangular list of values")
        lengths.append(len(values[0]))
        values = list(chain.from_iterable(values))
    raise invalid_request(f"the data of {name} is nested deeper than {_MOST_DEPTH} lists")


def elements(name: str, count: int, content: Buffer) -> list[memoryview]:
    """Split a BYTES tensor into views of `content`. Raises INVALID_REQUEST if they are not exactly `count`."""
    view, at = memoryview(content), 0
    found: list[memoryview] = []
    # A length takes four bytes at least: a wrong shape cannot make this run longer than the content.
    while at < len(view):
        if len(found) == count:
            raise invalid_request(f"{name} goes on after its {count} elements")
        start = at + _LENGTH.size
        end = start + _LENGTH.unpack_from(view, at)[0] if start <= len(view) else len(view) + 1
        if end > len(view):
            raise invalid_request(f"element {len(found)} of {name} ends beyond its data")
        found.append(view[start:end])
        at = end
    if len(found) != count:
        raise invalid_request(f"{name} has {len(found)} elements, but its shape holds {count}")
    return found


def to_bytes(array: Array | Sequence[bytes]) -> bytes:
    """Return a tensor's bytes in the wire's layout; BYTES are a sequence of elements."""
    return bytes(content_of(array))


def content_of(array: Array | Sequence[bytes]) -> bytes | memoryview:
    """Return a tensor's bytes like `to_bytes`, without a copy if they lie in the wire's layout already."""
    if isinstance(array, np.ndarray):
        return np.ascontiguousarray(array, array.dtype.newbyteorder("<")).reshape(-1).view(np.uint8).data
    return b"".join(part for element in array for part in (_LENGTH.pack(len(element)), element))


def pieces(content: Buffer) -> Iterator[bytes]:
    """Copy the content piece by piece to `bytes`: other threads run in between, and while these are joined."""
    for start in range(0, len(content), _PIECE_BYTES):
        yield bytes(content[start : start + _PIECE_BYTES])


def joined(parts: Sequence[Buffer]) -> memoryview:
    """Join the parts. Other threads run meanwhile: a copy of bytes would stop them, 50 ms for 100 MB."""
    whole = np.empty(sum(map(len, parts)), np.uint8)
    start = 0
    for part in parts:
        whole[start : start + len(part)] = np.frombuffer(part, np.uint8)
        start += len(part)
    return whole.data


def datatype_of(array: Array | Sequence[bytes]) -> str:
    """Return the protocol's name for an array's type. Raises KeyError for types it does not have."""
    if not isinstance(array, np.ndarray):
        return BYTES
    return _NAMES[array.dtype.newbyteorder("<")]


def stacked(rows: Iterable[Array]) -> Array:
    """Stack the rows of a batch into one tensor; rows that are shorter in some dimension are filled up with zeros."""
    arrays = list(rows)
    if len({array.shape for array in arrays}) == 1:
        return np.stack(arrays)
    longest = tuple(max(lengths) for lengths in zip(*(array.shape for array in arrays), strict=True))
    batch = np.zeros((len(arrays), *longest), arrays[0].dtype)
    for row, array in zip(batch, arrays, strict=True):
        row[tuple(slice(length) for length in array.shape)] = array
    return batch
