"""Reader of ONNX files: the graph, its weights and its metadata, without the `onnx` package.

Owns: the part of ONNX's protobuf format that inference graphs use (onnx.proto3, IR version 3 to 11). Must not know what
operators compute (models.onnx.operators). The files are untrusted: every length is checked against the bytes present,
subgraphs are read one deep, and weights outside the file must lie in the file's own directory.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from models.contract.errors import WeightsError
from models.contract.model import Array
from models.contract.regular import open_regular

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
_IR_VERSION = 8  # First byte of every exporter's files: field 1, a varint.
_STANDARD_DOMAINS = ("", "ai.onnx")

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


class _CutError(ValueError):
    """Bytes that end before the file does."""


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
    except _CutError as error:
        size = path.stat().st_size
        raise DamagedError(f"{path.name} is cut short: it ends after {size} bytes, within {error}.") from error
    except (ValueError, TypeError, LookupError, OverflowError, MemoryError) as error:
        raise DamagedError(f"{path.name} is damaged, cut short, or not an ONNX file.") from error


def fields(data: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """Yield number and content of each field: an int for varints, bytes for everything else."""
    at, end = 0, len(data)
    while at < end:
        key, at = _varint(data, at)
        number, kind = key >> 3, key & 7
        if kind == 0:
            value, at = _varint(data, at)
            yield number, value
            continue
        if kind == 2:
            size, at = _varint(data, at)
        else:
            size = {1: 8, 5: 4}.get(kind, -1)
        if size < 0 or at + size > end:
            raise ValueError
        yield number, data[at : at + size]
        at += size


def _whole_fields(data: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """Yield the fields of the file itself, which may end too early. Raises _CutError then."""
    if not data:
        raise _CutError("its first field")
    seen = False
    try:
        for field_of_file in fields(data):
            seen = True
            yield field_of_file
    except (ValueError, IndexError):
        if not seen or data[0] != _IR_VERSION:
            raise
        raise _CutError("one of its fields") from None


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise ValueError


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
    """Decode one number, or several that are packed."""
    if isinstance(value, int):
        return [_signed(value)]
    numbers, at = [], 0
    while at < len(value):
        number, at = _varint(value, at)
        numbers.append(_signed(number))
    return numbers


def _floats(value: int | memoryview) -> list[float]:
    return [float(number) for number in np.frombuffer(_bytes(value), "<f4")]


class _Reader:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._depth = self._nodes = 0

    def model(self, data: memoryview) -> OnnxFile:
        found = OnnxFile()
        graph: memoryview | None = None
        for number, value in _whole_fields(data):
            if number == 7:
                graph = _bytes(value)
            elif number == 8:
                domain, version = self._opset(_bytes(value))
                if domain in _STANDARD_DOMAINS:
                    found.opset = version
            elif number == 14:
                key, text = self._pair(_bytes(value))
                found.metadata[key] = text
        if graph is None or not found.opset:
            raise ValueError
        self._graph(graph, found)
        return found

    def _opset(self, data: memoryview) -> tuple[str, int]:
        domain, version = "", 0
        for number, value in fields(data):
            if number == 1:
                domain = _text(value)
            elif number == 2:
                version = _int(value)
        return domain, version

    def _pair(self, data: memoryview) -> tuple[str, str]:
        pair = {number: _text(value) for number, value in fields(data) if number in (1, 2)}
        return pair.get(1, ""), pair.get(2, "")

    def _graph(self, data: memoryview, found: OnnxFile) -> None:
        inputs: list[Value] = []
        outputs: list[Value] = []
        for number, value in fields(data):
            if number == 1:
                found.nodes.append(self._node(_bytes(value)))
                self._nodes += 1
                if self._nodes > MAX_NODES:
                    raise _InvalidError(f"has more than {MAX_NODES} nodes")
            elif number == 5:
                name, array = self._tensor(_bytes(value))
                found.constants[name] = array
            elif number == 11:
                inputs.append(self._value(_bytes(value)))
            elif number == 12:
                outputs.append(self._value(_bytes(value)))
            elif number == 15:
                raise _InvalidError("has sparse weights, which are not read")
        found.inputs = tuple(each for each in inputs if each.name not in found.constants)
        found.outputs = tuple(outputs)

    def _node(self, data: memoryview) -> Node:
        inputs: list[str] = []
        outputs: list[str] = []
        attributes: dict[str, Any] = {}
        name = operator = domain = ""
        for number, value in fields(data):
            if number == 1:
                inputs.append(_text(value))
            elif number == 2:
                outputs.append(_text(value))
            elif number == 3:
                name = _text(value)
            elif number == 4:
                operator = _text(value)
            elif number == 5:
                key, attribute = self._attribute(_bytes(value))
                attributes[key] = attribute
            elif number == 7:
                domain = _text(value)
        full = operator if domain in _STANDARD_DOMAINS else f"{domain}.{operator}"
        return Node(full, tuple(inputs), tuple(outputs), attributes, name)

    def _attribute(self, data: memoryview) -> tuple[str, Any]:
        name, kind = "", 0
        single: Any = None
        many: list[Any] = []
        for number, value in fields(data):
            if number == 1:
                name = _text(value)
            elif number == 20:
                kind = _int(value)
            elif number == 2:
                single = float(np.frombuffer(_bytes(value), "<f4")[0])
            elif number == 3:
                single = _int(value)
            elif number == 4:
                single = _text(value)
            elif number == 5:
                single = self._tensor(_bytes(value))[1]
            elif number in (6, 10):
                single = self._subgraph(_bytes(value))
                kind = 5
            elif number == 7:
                many += _floats(value)
            elif number == 8:
                many += _ints(value)
            elif number == 9:
                many.append(_text(value))
        if kind == 1 and single is None:
            single = 0.0
        if kind == 2 and single is None:
            single = 0
        return name, many if kind in (6, 7, 8) else single

    def _subgraph(self, data: memoryview) -> OnnxFile | None:
        """Read a subgraph; None for one within a subgraph."""
        if self._depth:
            return None
        found = OnnxFile()
        self._depth += 1
        self._graph(data, found)
        self._depth -= 1
        return found

    def _value(self, data: memoryview) -> Value:
        name, dtype, shape = "", None, None
        for number, value in fields(data):
            if number == 1:
                name = _text(value)
            elif number == 2:
                for kind, content in fields(_bytes(value)):
                    if kind == 1:
                        dtype, shape = self._tensor_type(_bytes(content))
        return Value(name, dtype, shape)

    def _tensor_type(self, data: memoryview) -> tuple[np.dtype[Any] | None, tuple[Length, ...] | None]:
        dtype, shape = None, None
        for number, value in fields(data):
            if number == 1:
                dtype = _DTYPES.get(_int(value))
            elif number == 2:
                shape = tuple(self._length(_bytes(each)) for kind, each in fields(_bytes(value)) if kind == 1)
        return dtype, shape

    def _length(self, data: memoryview) -> Length:
        length: Length = None
        for number, value in fields(data):
            if number == 1:
                length = _int(value) if _int(value) > 0 else None
            elif number == 2:
                length = _text(value) or None
        return length

    def _tensor(self, data: memoryview) -> tuple[str, Array]:
        name, kind, external = "", 0, False
        dims: list[int] = []
        raw: memoryview | None = None
        numbers: list[Any] = []
        places: dict[str, str] = {}
        for number, value in fields(data):
            if number == 1:
                dims += _ints(value)
            elif number == 2:
                kind = _int(value)
            elif number == 4:
                numbers += _floats(value)
            elif number in (5, 7, 11):
                numbers += _ints(value)
            elif number == 8:
                name = _text(value)
            elif number == 9:
                raw = _bytes(value)
            elif number == 10:
                numbers += [float(each) for each in np.frombuffer(_bytes(value), "<f8")]
            elif number == 13:
                key, text = self._pair(_bytes(value))
                places[key] = text
            elif number == 14:
                external = _int(value) == 1
        if external:
            raw = self._external(places)
        return name, _array(name, kind, dims, raw, numbers)

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
