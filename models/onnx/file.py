"""Reader of ONNX files: the graph, its weights and its metadata, without the `onnx` package.

Owns: the part of ONNX's protobuf format that inference graphs use (onnx.proto3, IR version 3 to 11). Must not know what
operators compute (models.onnx.operators). The files are untrusted: every length is checked against the bytes present,
subgraphs are read one deep, and weights outside the file must lie in the file's own directory.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from anychip_base.protobuf import varint
from models.contract.errors import WeightsError
from models.contract.files import open_regular
from models.contract.model import Array

MAX_FILE_BYTES = 4 << 30
MAX_NODES = 200_000

_FLOAT16, _BFLOAT16 = 10, 16
_DTYPES: dict[int, np.dtype[Any]] = {
    1: np.dtype("<f4"),
    2: np.dtype("u1"),
    3: np.dtype("i1"),
    4: np.dtype("<u2"),
    5: np.dtype("<i2"),
    6: np.dtype("<i4"),
    7: np.dtype("<i8"),
    9: np.dtype("?"),
    _FLOAT16: np.dtype("<f2"),
    11: np.dtype("<f8"),
    12: np.dtype("<u4"),
    13: np.dtype("<u8"),
}
_STANDARD_DOMAINS = ("", "ai.onnx")
_MANY = (6, 7, 8)  # AttributeProto.AttributeType: FLOATS, INTS, STRINGS; of 1 to 5 each is one less than its field.

Length = int | str | None
"""An axis in the file's terms: its length, the name of an open one, None for an open one without a name."""


@dataclass(frozen=True)
class Value:
    """An input or output of the graph. `dtype` is None if the file states none or one that is not read."""

    name: str
    dtype: np.dtype[Any] | None
    shape: tuple[Length, ...] | None


@dataclass(frozen=True)
class Node:
    """One operator call. `inputs` may hold "" for an omitted optional input."""

    operator: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: dict[str, Any]
    name: str = ""


@dataclass
class OnnxFile:
    """Content of an ONNX file. `constants`: the weights by name; `inputs` are only those that are no weights."""

    opset: int = 0
    metadata: dict[str, str] = field(default_factory=dict)
    nodes: list[Node] = field(default_factory=list)
    constants: dict[str, Array] = field(default_factory=dict)
    inputs: tuple[Value, ...] = ()
    outputs: tuple[Value, ...] = ()

    def with_constants(self, given: Mapping[str, Array]) -> OnnxFile:
        """Return the same file with the inputs named in `given` as constants."""
        taken = {value.name: given[value.name] for value in self.inputs if value.name in given}
        left = tuple(value for value in self.inputs if value.name not in taken)
        return replace(self, inputs=left, constants={**self.constants, **taken})


class DamagedError(WeightsError):
    """Bytes that are no whole ONNX file for any reader."""


class _InvalidError(ValueError):
    """Part of a file that is not read; the message continues a sentence that begins with the file's name."""


def read_onnx(path: Path) -> OnnxFile:
    """Read the whole file. Raises WeightsError; DamagedError if no reader could read it."""
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise _InvalidError(f"is larger than {MAX_FILE_BYTES >> 30} GiB")
        return _Reader(path).model(memoryview(path.read_bytes()))
    except _InvalidError as error:
        raise WeightsError(f"{path.name} {error}.") from error
    except OSError as error:
        raise WeightsError(f"{path.name} cannot be read: {error.strerror or error}.") from error
    except (ValueError, TypeError, LookupError, OverflowError, MemoryError) as error:
        raise DamagedError(f"{path.name} is damaged, cut short, or not an ONNX file.") from error


def fields(data: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """Yield number and content of each field: an int for varints, bytes for everything else."""
    at, end = 0, len(data)
    while at < end:
        key, at = varint(data, at)
        number, kind = key >> 3, key & 7
        if kind == 0:
            value, at = varint(data, at)
            yield number, value
            continue
        if kind == 2:
            size, at = varint(data, at)
        else:
            size = {1: 8, 5: 4}.get(kind, -1)
        if size < 0 or at + size > end:
            raise ValueError
        yield number, data[at : at + size]
        at += size


def _signed(value: int) -> int:
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


def _bytes(value: int | memoryview) -> memoryview:
    if isinstance(value, int):
        raise ValueError
    return value


def _int(value: int | memoryview) -> int:
    if not isinstance(value, int):
        raise ValueError
    return _signed(value)


def _text(value: int | memoryview) -> str:
    return bytes(_bytes(value)).decode("utf-8", "replace")


def _ints(value: int | memoryview) -> list[int]:
    if isinstance(value, int):
        return [_signed(value)]
    numbers, at = [], 0
    while at < len(value):
        number, at = varint(value, at)
        numbers.append(_signed(number))
    return numbers


def _floats(value: int | memoryview, dtype: str = "<f4") -> list[float]:
    numbers: list[float] = np.frombuffer(_bytes(value), dtype).tolist()
    return numbers


class _Message:
    """Fields of a message: those in `kinds`, by number, each converted by its function."""

    def __init__(
        self, found: Iterable[tuple[int, int | memoryview]], kinds: Mapping[int, Callable[[Any], Any]]
    ) -> None:
        self._found: dict[int, list[Any]] = {number: [] for number in kinds}
        for number, value in found:
            if number in kinds:
                self._found[number].append(kinds[number](value))

    def all(self, number: int) -> list[Any]:
        return self._found[number]

    def last(self, number: int, missing: Any = None) -> Any:
        found = self._found[number]
        return found[-1] if found else missing

    def joined(self, *numbers: int) -> list[Any]:
        return [each for number in numbers for values in self._found[number] for each in values]


def _pair(value: int | memoryview) -> tuple[str, str]:
    pair = _Message(fields(_bytes(value)), {1: _text, 2: _text})
    return pair.last(1, ""), pair.last(2, "")


def _opset(value: int | memoryview) -> tuple[str, int]:
    found = _Message(fields(_bytes(value)), {1: _text, 2: _int})
    return found.last(1, ""), found.last(2, 0)


def _value(value: int | memoryview) -> Value:
    found = _Message(fields(_bytes(value)), {1: _text, 2: _type})
    return Value(found.last(1, ""), *found.last(2, (None, None)))


def _type(value: int | memoryview) -> tuple[np.dtype[Any] | None, tuple[Length, ...] | None]:
    found = _Message(fields(_bytes(value)), {1: lambda tensor: _Message(fields(_bytes(tensor)), {1: _int, 2: _shape})})
    tensor = found.last(1)
    return (None, None) if tensor is None else (_DTYPES.get(tensor.last(1, 0)), tensor.last(2))


def _shape(value: int | memoryview) -> tuple[Length, ...]:
    return tuple(_Message(fields(_bytes(value)), {1: _length}).all(1))


def _length(value: int | memoryview) -> Length:
    length: Length = None
    for number, each in fields(_bytes(value)):
        if number == 1:
            length = _int(each) if _int(each) > 0 else None
        elif number == 2:
            length = _text(each) or None
    return length


class _Reader:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._depth = self._nodes = 0

    def model(self, data: memoryview) -> OnnxFile:
        found = _Message(fields(data), {7: _bytes, 8: _opset, 14: _pair})
        opsets = [version for domain, version in found.all(8) if domain in _STANDARD_DOMAINS]
        graph = found.last(7)
        if graph is None or not opsets or not opsets[-1]:
            raise ValueError
        return replace(self._graph(graph), opset=opsets[-1], metadata=dict(found.all(14)))

    def _graph(self, value: int | memoryview) -> OnnxFile:
        kinds = {1: self._node, 5: self._tensor, 11: _value, 12: _value, 15: self._sparse}
        found = _Message(fields(_bytes(value)), kinds)
        constants = dict(found.all(5))
        inputs = tuple(each for each in found.all(11) if each.name not in constants)
        return OnnxFile(nodes=found.all(1), constants=constants, inputs=inputs, outputs=tuple(found.all(12)))

    def _sparse(self, _: int | memoryview) -> None:
        raise _InvalidError("has sparse weights, which are not read")

    def _node(self, value: int | memoryview) -> Node:
        self._nodes += 1
        if self._nodes > MAX_NODES:
            raise _InvalidError(f"has more than {MAX_NODES} nodes")
        found = _Message(fields(_bytes(value)), {1: _text, 2: _text, 3: _text, 4: _text, 5: self._attribute, 7: _text})
        operator, domain = found.last(4, ""), found.last(7, "")
        full = operator if domain in _STANDARD_DOMAINS else f"{domain}.{operator}"
        return Node(full, tuple(found.all(1)), tuple(found.all(2)), dict(found.all(5)), found.last(3, ""))

    def _attribute(self, value: int | memoryview) -> tuple[str, Any]:
        single: dict[int, Callable[[Any], Any]] = {
            2: lambda each: _floats(each)[0],
            3: _int,
            4: _text,
            5: lambda each: self._tensor(each)[1],
            6: self._subgraph,
        }
        many: dict[int, Callable[[Any], Any]] = {7: _floats, 8: _ints, 9: lambda each: [_text(each)]}
        found = _Message(fields(_bytes(value)), {1: _text, 20: _int, **single, **many})
        name, kind = found.last(1, ""), found.last(20, 0)
        if kind in _MANY:
            return name, found.joined(*many)
        # Old files do not state the kind.
        numbers = [kind + 1] if kind + 1 in single else [number for number in single if found.all(number)]
        return name, found.last(numbers[-1], {1: 0.0, 2: 0}.get(kind)) if numbers else None

    def _subgraph(self, value: int | memoryview) -> OnnxFile | None:
        if self._depth:
            return None
        self._depth += 1
        found = self._graph(value)
        self._depth -= 1
        return found

    def _tensor(self, value: int | memoryview) -> tuple[str, Array]:
        kinds: dict[int, Callable[[Any], Any]] = {
            1: _ints,
            2: _int,
            4: _floats,
            **dict.fromkeys((5, 7, 11), _ints),
            8: _text,
            9: _bytes,
            10: partial(_floats, dtype="<f8"),
        }
        found = _Message(fields(_bytes(value)), {**kinds, 13: _pair, 14: _int})
        raw = self._external(dict(found.all(13))) if found.last(14) == 1 else found.last(9)
        name, numbers = found.last(8, ""), found.joined(4, 5, 7, 10, 11)
        return name, _array(name, found.last(2, 0), found.joined(1), raw, numbers)

    def _external(self, places: dict[str, str]) -> memoryview:
        """Read weights in a file beside this one: never outside its directory."""
        file = self._path.parent / places.get("location", "")
        try:
            descriptor = open_regular(file, self._path.parent)
        except (OSError, WeightsError):
            raise _InvalidError(
                f"keeps its weights in {places.get('location', '')!r}, which is not beside it"
            ) from None
        with open(descriptor, "rb") as stream:
            offset = int(places.get("offset", "0"))
            size = os.fstat(descriptor).st_size
            length = int(places.get("length", str(size - offset)))
            if not (0 <= offset <= size and 0 <= length <= size - offset):
                raise _InvalidError(f"keeps weights in {file.name}, which is cut short at {size} bytes: copy it again")
            stream.seek(offset)
            return memoryview(stream.read(length))


def _array(name: str, kind: int, dims: list[int], raw: memoryview | None, numbers: list[Any]) -> Array:
    if any(length < 0 for length in dims) or len(dims) > 16:
        raise _InvalidError(f"has a tensor {name!r} of impossible shape")
    if kind == _BFLOAT16:
        bits = np.frombuffer(raw, "<u2") if raw is not None else np.array(numbers, np.uint16)
        array: Array = (bits.astype(np.uint32) << 16).view(np.float32)
    elif kind not in _DTYPES:
        raise _InvalidError(f"has a tensor {name!r} of a type that is not read ({kind})")
    elif raw is not None:
        array = np.frombuffer(raw, _DTYPES[kind])
    elif kind == _FLOAT16:  # An int32 holds the bits of a half.
        array = np.array(numbers, np.uint16).view("<f2")
    else:
        array = np.array(numbers, _DTYPES[kind])
    if array.size != int(np.prod([int(length) for length in dims], dtype=object)):
        raise _InvalidError(f"has a tensor {name!r} of shape {dims} with {array.size} numbers")
    return array.reshape(dims)
