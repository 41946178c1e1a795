"""Objects as data: what a process is to load, without pickle.

    object ─► MessagePack of names and values, arrays beside it as they are ─► object

Owns: the form. What is written is what an object consists of: its class by name, its fields, and so on. Reading makes
such an object and sets its fields; it calls nothing that the data names, so bytes cannot be instructions. The server
alone writes this, and only its workers and decoders read it.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePath
from types import MappingProxyType
from typing import Any

import msgspec

_ARRAY, _OBJECT, _TUPLE, _DICT, _PATH, _ENUM = range(1, 7)
"""Kinds of what MessagePack has no form for: each is an extension with a list as content."""


def packed(value: object) -> tuple[bytes, list[memoryview]]:
    """The data of an object, and the bytes of its arrays in order. Raises TypeError for what is more than data."""
    buffers: list[memoryview] = []
    return msgspec.msgpack.encode(_plain(value, buffers)), buffers


def unpacked(data: bytes | memoryview, buffers: Sequence[memoryview]) -> Any:
    """The object again, its arrays over `buffers`. Raises ValueError, TypeError, ImportError."""
    return _decoder(buffers).decode(data)


def _extended(kind: int, content: object) -> msgspec.msgpack.Ext:
    return msgspec.msgpack.Ext(kind, msgspec.msgpack.encode(content))


def _plain(value: Any, buffers: list[memoryview]) -> Any:
    """In what MessagePack has, and extensions."""
    if value is None or type(value) in (bool, int, float, str, bytes):
        return value
    if type(value) is list:
        return [_plain(each, buffers) for each in value]
    if type(value) is tuple:
        return _extended(_TUPLE, [_plain(each, buffers) for each in value])
    if isinstance(value, dict | MappingProxyType):
        pairs = [[_plain(key, buffers), _plain(each, buffers)] for key, each in value.items()]
        return _extended(_DICT, pairs)
    if isinstance(value, PurePath):
        return _extended(_PATH, [str(value)])
    kind = type(value)
    if isinstance(value, enum.Enum):
        return _extended(_ENUM, [kind.__module__, kind.__qualname__, value.name])
    if kind.__module__ == "numpy" and kind.__qualname__ == "ndarray":
        array = value if value.flags.c_contiguous else value.copy(order="C")
        buffers.append(memoryview(array.reshape(-1).view("u1")))
        return _extended(_ARRAY, [array.dtype.str, list(array.shape), len(buffers) - 1])
    fields = {name: _plain(each, buffers) for name, each in _state(value).items()}
    return _extended(_OBJECT, [kind.__module__, kind.__qualname__, fields])


def _state(value: Any) -> Mapping[str, Any]:
    """Raises TypeError for an object whose class says itself how it is written, or that is more than its fields."""
    kind = type(value)
    if isinstance(value, type) or callable(getattr(value, "__func__", None)) or kind.__module__ == "builtins":
        raise TypeError(f"{kind.__qualname__} is more than data")
    slots = [name for each in kind.__mro__ for name in getattr(each, "__slots__", ()) if name not in _NO_STATE]
    state = {name: getattr(value, name) for name in slots if hasattr(value, name)}
    return state | getattr(value, "__dict__", {})


_OURS = ("app", "backends", "models")
_NO_STATE = ("__dict__", "__weakref__")


def _decoder(buffers: Sequence[memoryview]) -> msgspec.msgpack.Decoder[Any]:
    def hook(code: int, data: memoryview) -> Any:
        read = _READERS.get(code)
        if read is None:
            raise ValueError(f"extension {code} is none of ours")
        return read(decoder.decode(data), buffers)

    decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(ext_hook=hook)
    return decoder


def _array(content: list[Any], buffers: Sequence[memoryview]) -> Any:
    import numpy as np

    kind, shape, number = content
    return np.frombuffer(buffers[number], np.dtype(kind)).reshape(shape)


def _named(module: str, name: str) -> Any:
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    if not isinstance(found, type):
        raise ValueError(f"{module}.{name} is no class")
    return found


def _object(content: list[Any], _: Sequence[memoryview]) -> Any:
    module, name, fields = content
    kind = _named(module, name)
    if not (dataclasses.is_dataclass(kind) or module.partition(".")[0] in _OURS):
        raise ValueError(f"{name} is no class of ours")
    made = object.__new__(kind)  # Neither __init__ nor __setstate__ is called.
    for field, value in fields.items():
        object.__setattr__(made, field, value)
    return made


def _path(content: list[Any], _: Sequence[memoryview]) -> Any:
    from pathlib import Path

    return Path(content[0])


def _enum(content: list[Any], _: Sequence[memoryview]) -> Any:
    kind = _named(content[0], content[1])
    if not issubclass(kind, enum.Enum):
        raise ValueError(f"{content[1]} is no enumeration")
    return kind[content[2]]


_READERS: Mapping[int, Callable[[Any, Sequence[memoryview]], Any]] = {
    _ARRAY: _array,
    _OBJECT: _object,
    _TUPLE: lambda content, _: tuple(content),
    _DICT: lambda content, _: dict(content),
    _PATH: _path,
    _ENUM: _enum,
}
