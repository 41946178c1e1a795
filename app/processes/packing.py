"""Packing of objects as data, without pickle, in memory of its own: it carries what a process is to load.

    object ─► MessagePack of names and values, arrays behind it as they are ─► object

An object is written as its class's name, its fields, and so on. Reading makes such an object and sets its fields; it
calls nothing that the data names, so bytes cannot be instructions. The server alone writes this. Neither end copies
arrays while it holds the interpreter's lock.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import math
import mmap
import os
import struct
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import PurePath
from types import MappingProxyType
from typing import Any

import msgspec

_ARRAY, _OBJECT, _TUPLE, _DICT, _PATH, _ENUM = range(1, 7)
"""Kinds of values that MessagePack has no form for: each is an extension with a list as content."""


def write_packed(value: object, name: str) -> int:
    """Write the object to memory (a memfd) and return its descriptor, the caller's to close.

    May take a moment: not for the event loop. Raises TypeError for what is more than data, OSError.
    """
    arrays = _Arrays()
    content = msgspec.msgpack.encode(_packable(value, arrays))
    first = _aligned(_HEAD.size + len(content))
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC)
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(_HEAD.pack(len(content)) + content)
            for start, array in arrays.parts:
                file.seek(first + start)
                file.write(array)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def packed(value: object) -> bytes:
    """Pack an object without arrays, for `unpacked`. Raises TypeError for what is more than data."""
    return msgspec.msgpack.encode(_packable(value, _Arrays()))


def read_packed(descriptor: int) -> Any:
    """Read the object and close the descriptor. Arrays are the reader's own to write to, and shared until it does.

    Raises ValueError, TypeError, ImportError.
    """
    try:
        memory = memoryview(mmap.mmap(descriptor, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE))
    finally:
        os.close(descriptor)
    end = _HEAD.size + _HEAD.unpack_from(memory)[0]
    return unpacked(memory[_HEAD.size : end], memory[_aligned(end) :])


def unpacked(content: bytes | memoryview, arrays: memoryview) -> Any:
    """Make the object of this content, over the memory of its arrays. Raises as `read_packed`."""

    def hook(code: int, data: memoryview) -> Any:
        read = _READERS.get(code)
        if read is None:
            raise ValueError(f"extension {code} is none of ours")
        return read(decoder.decode(data), arrays)

    decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(ext_hook=hook)
    return decoder.decode(content)


_HEAD = struct.Struct("<Q")  # The length of the content, after which the arrays lie.
_ALIGNMENT_BYTES = 64


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


class _Arrays:
    """The bytes of an object's arrays, each with its place behind the content."""

    def __init__(self) -> None:
        self.parts: list[tuple[int, memoryview]] = []
        self._end = 0

    def add(self, array: Any) -> int:
        start = _aligned(self._end)
        self.parts.append((start, memoryview(array.reshape(-1).view("u1"))))
        self._end = start + array.nbytes
        return start


def _extended(kind: int, content: object) -> msgspec.msgpack.Ext:
    return msgspec.msgpack.Ext(kind, msgspec.msgpack.encode(content))


def _packable(value: Any, arrays: _Arrays) -> Any:
    if value is None or type(value) in (bool, int, float, str, bytes):
        return value
    if type(value) is list:
        return [_packable(each, arrays) for each in value]
    if type(value) is tuple:
        return _extended(_TUPLE, [_packable(each, arrays) for each in value])
    if isinstance(value, dict | MappingProxyType):
        pairs = [[_packable(key, arrays), _packable(each, arrays)] for key, each in value.items()]
        return _extended(_DICT, pairs)
    if isinstance(value, PurePath):
        return _extended(_PATH, [str(value)])
    kind = type(value)
    if isinstance(value, enum.Enum):
        return _extended(_ENUM, [kind.__module__, kind.__qualname__, value.name])
    if kind.__module__ == "numpy" and kind.__qualname__ == "ndarray":
        array = value if value.flags.c_contiguous else value.copy(order="C")
        return _extended(_ARRAY, [array.dtype.str, list(array.shape), arrays.add(array)])
    fields = {name: _packable(each, arrays) for name, each in _state(value).items()}
    return _extended(_OBJECT, [kind.__module__, kind.__qualname__, fields])


def _state(value: Any) -> Mapping[str, Any]:
    """Return the fields of an object. Raises TypeError for one that is more than its fields."""
    kind = type(value)
    if isinstance(value, type) or callable(getattr(value, "__func__", None)) or kind.__module__ == "builtins":
        raise TypeError(f"{kind.__qualname__} is more than data")
    slots = [name for each in kind.__mro__ for name in getattr(each, "__slots__", ()) if name not in _NO_STATE]
    state = {name: getattr(value, name) for name in slots if hasattr(value, name)}
    # A cached property is computed again if it is needed.
    kept = getattr(value, "__dict__", {}).items()
    return state | {name: each for name, each in kept if not isinstance(getattr(kind, name, None), cached_property)}


_OURS = ("app", "backends", "models")
_NO_STATE = ("__dict__", "__weakref__")


def _array(content: list[Any], arrays: memoryview) -> Any:
    import numpy as np

    kind, shape, start = content
    return np.frombuffer(arrays, np.dtype(kind), math.prod(shape), start).reshape(shape)


def _named(module: str, name: str) -> Any:
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    if not isinstance(found, type):
        raise ValueError(f"{module}.{name} is no class")
    return found


def _object(content: list[Any], _: memoryview) -> Any:
    module, name, fields = content
    kind = _named(module, name)
    if not (dataclasses.is_dataclass(kind) or module.partition(".")[0] in _OURS):
        raise ValueError(f"{name} is no class of ours")
    made = object.__new__(kind)  # Neither __init__ nor __setstate__ is called.
    for field, value in fields.items():
        object.__setattr__(made, field, value)
    return made


def _path(content: list[Any], _: memoryview) -> Any:
    from pathlib import Path

    return Path(content[0])


def _enum(content: list[Any], _: memoryview) -> Any:
    kind = _named(content[0], content[1])
    if not issubclass(kind, enum.Enum):
        raise ValueError(f"{content[1]} is no enumeration")
    return kind[content[2]]


_READERS: Mapping[int, Callable[[Any, memoryview], Any]] = {
    _ARRAY: _array,
    _OBJECT: _object,
    _TUPLE: lambda content, _: tuple(content),
    _DICT: lambda content, _: dict(content),
    _PATH: _path,
    _ENUM: _enum,
}
