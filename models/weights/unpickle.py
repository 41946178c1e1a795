"""Reader of torch.save's files that runs nothing in them.

Owns: a pickle machine that has no instruction to call anything, and the torch zip archive around it. Must not import a
name of a file, and must not know architectures or labels.

`pickle.Unpickler` calls the names in a file and `find_class` can only choose among names, so every admitted name is
attack surface (`__setstate__`, `__defaults__`, `Tensor.set_` that grows a storage). Here a name never becomes an
object. Containers become lists and dicts, tensors become `StoredTensor` records that are checked against the archive,
and every other object becomes an inert `StandIn` with only its attributes. A name outside the few that weight files
need is refused.
"""

from __future__ import annotations

import math
import pickletools
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

MAX_PICKLE_BYTES = 8 << 20  # YOLOv8x, the largest official file, has 0.4 MB; every byte may cost 60 of memory
MAX_COPIED = 1 << 20
"""Most entries that calls of the pickle may copy between containers. A pickle names the same container in two bytes as
often as it likes, so copying must be bounded.
"""

_PROGRAM = ("/archive_format", "serialized_exported_program.json")
"""Ends of entries of torch.export's files, of today and of torch before 2.8."""
_DTYPES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}
_STAND_IN_MODULES = ("ultralytics", "torch.nn.modules", "torch.nn.parameter", "torchvision.models", "torchvision.ops")
_STAND_IN_NAMES = {
    *(f"torch.{name}" for name in ("device", "float16", "float32", "float64", "bfloat16", "int64", "int32", "Size")),
    *(f"{numpy}.multiarray.scalar" for numpy in ("numpy.core", "numpy._core")),
    *("numpy.dtype", "pathlib.PosixPath", "pathlib.WindowsPath", "pathlib._local.PosixPath"),
    *("datetime.datetime", "datetime.date", "datetime.timezone", "datetime.timedelta", "argparse.Namespace"),
    *("types.SimpleNamespace", "_codecs.encode"),
}
_REBUILD_TENSOR = ("torch._utils._rebuild_tensor", "torch._utils._rebuild_tensor_v2")
_REBUILD_PARAMETER = ("torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state")


class RefusedError(Exception):
    """Refusal of a file; the message continues a sentence that begins with the file's name."""


@dataclass(frozen=True, eq=False)
class Name:
    """A class or function in the pickle by name, never looked up."""

    path: str


@dataclass(frozen=True, eq=False)
class Storage:
    """An entry of the archive: `length` elements of `dtype`."""

    key: str
    dtype: torch.dtype
    length: int


@dataclass(frozen=True, eq=False)
class StoredTensor:
    """A tensor within a storage: checked, not yet read."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(eq=False)
class StandIn:
    """Replacement of an object: its class's name and its attributes."""

    name: str
    attributes: dict[Any, Any] = field(default_factory=dict)


def interpret(pickle: bytes, storage: Callable[[Any], Storage]) -> Any:
    """Build the object of a pickle, of lists, tuples, dicts, scalars, StoredTensor and StandIn; sets become lists.

    `storage` turns a persistent id into a Storage. Time and memory are linear in the length of the pickle. Raises
    RefusedError, and ValueError, TypeError or LookupError for a senseless pickle.
    """
    calls = _Calls()
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}
    named: set[str] = set()

    def popped_to_mark() -> list[Any]:
        start = marks.pop()
        items = stack[start:]
        del stack[start:]
        return items

    argument: Any
    for opcode, argument, _ in pickletools.genops(pickle):
        match opcode.name:
            case "PROTO" | "FRAME":
                pass
            case "BINGET" | "LONG_BINGET":
                stack.append(memo[argument])
            case "BINPUT" | "LONG_BINPUT":
                memo[argument] = stack[-1]
            case "MEMOIZE":
                memo[len(memo)] = stack[-1]
            case "BININT" | "BININT1" | "BININT2" | "LONG1" | "BINFLOAT" | "BINUNICODE" | "SHORT_BINUNICODE":
                stack.append(argument)
            case "BINBYTES" | "SHORT_BINBYTES":
                stack.append(argument)
            case "NONE" | "NEWTRUE" | "NEWFALSE":
                stack.append({"NONE": None, "NEWTRUE": True, "NEWFALSE": False}[opcode.name])
            case "MARK":
                marks.append(len(stack))
            case "EMPTY_TUPLE":
                stack.append(())
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                count = int(opcode.name[-1])
                stack[-count:] = [tuple(stack[-count:])]
            case "TUPLE":
                stack.append(tuple(popped_to_mark()))
            case "EMPTY_LIST" | "EMPTY_SET":
                stack.append([])
            case "APPEND":
                item = stack.pop()
                _list(stack[-1]).append(item)
            case "APPENDS" | "ADDITEMS":
                items = popped_to_mark()
                _list(stack[-1]).extend(items)
            case "EMPTY_DICT":
                stack.append({})
            case "SETITEM":
                value, key = stack.pop(), stack.pop()
                _set_items(stack[-1], [key, value])
            case "SETITEMS":
                items = popped_to_mark()
                _set_items(stack[-1], items)
            case "GLOBAL":
                stack.append(_admitted(str(argument).replace(" ", "."), named))
            case "STACK_GLOBAL":
                name, module = stack.pop(), stack.pop()
                if not isinstance(name, str) or not isinstance(module, str):
                    # Never printed: the text of nested tuples is exponentially longer than the pickle.
                    raise RefusedError("names something by what is not text; nothing of the file has run")
                stack.append(_admitted(f"{module}.{name}", named))
            case "REDUCE" | "NEWOBJ":
                arguments, called = stack.pop(), stack.pop()
                stack.append(calls.result(called, arguments))
            case "BUILD":
                state = stack.pop()
                calls.build(stack[-1], state)
            case "BINPERSID":
                stack.append(storage(stack.pop()))
            case "STOP":
                return stack.pop()
            case other:
                raise RefusedError(f"uses the pickle instruction {other}, which no weights file needs")
    raise RefusedError("is cut short")


def _admitted(path: str, named: set[str]) -> Name:
    named.add(path)
    module, _, name = path.rpartition(".")
    known = (
        path in _STAND_IN_NAMES
        or path in _REBUILD_TENSOR + _REBUILD_PARAMETER
        or path == "collections.OrderedDict"
        or (module in ("builtins", "__builtin__") and name in ("set", "frozenset", "getattr"))
        or (module == "torch" and name in _DTYPES)
        # Nobody would apply those of other networks.
        or (module.startswith("torchvision.transforms.") and "ultralytics.nn.tasks.ClassificationModel" in named)
        or any(module == root or module.startswith(root + ".") for root in _STAND_IN_MODULES)
    )
    if not known:
        raise foreign(path)
    return Name(path)


def foreign(path: str) -> RefusedError:
    """Return the refusal of a file that names this class or function."""
    sentence = f"names {path[:100]!r}, which no weights file needs; nothing of the file has run"
    return RefusedError(f"{sentence}. Of a whole network save its state_dict(), of NumPy's arrays tensors")


class _Calls:
    """Replacements of calls, within a bound on what they copy."""

    def __init__(self) -> None:
        self._left = MAX_COPIED

    def _counted(self, container: Any) -> Any:
        if not isinstance(container, list | tuple | dict):
            raise RefusedError("makes a container of something that is none")
        self._left -= len(container)
        if self._left < 0:
            raise RefusedError(f"copies more than {MAX_COPIED} entries, as no weights file does")
        return container

    def result(self, called: Any, arguments: Any) -> Any:
        if not isinstance(called, Name) or not isinstance(arguments, tuple):
            raise RefusedError("calls something that is not a plain name; nothing of the file has run")
        path = called.path
        if path in _REBUILD_TENSOR:
            return _stored_tensor(*arguments[:4])
        if path in _REBUILD_PARAMETER:
            return arguments[0]
        if path == "collections.OrderedDict":
            made: dict[Any, Any] = {}
            for pair in self._counted(arguments[0]) if arguments else ():
                _set_items(made, list(self._counted(pair)))
            return made
        if path == "torch.Size":
            return tuple(self._counted(arguments[0]))
        if path.endswith(".InterpolationMode"):
            return arguments[0]
        if path.endswith((".set", ".frozenset")):
            return list(self._counted(arguments[0])) if arguments else []
        if path.endswith(".getattr"):
            # Some published YOLOv8 files hold a bound method of a module: an object and a name, which stays just that.
            match arguments:
                case (StandIn(), str(attribute)) if not attribute.startswith("_"):
                    return StandIn("getattr")
                case (Name(path=enumeration), str(member)) if enumeration.endswith(".InterpolationMode"):
                    return member.lower()  # Python 3.11 wrote enumerations by name before 3.11.5.
                case _:
                    raise RefusedError("calls getattr as no weights file does; nothing of the file has run")
        return StandIn(path)

    def build(self, target: Any, state: Any) -> None:
        if isinstance(target, dict):  # The `_metadata` of a state dict: all modules, those without weights, too.
            check_modules_named(self._counted(state.get("_metadata") or {}) if isinstance(state, dict) else ())
            return
        if not isinstance(target, StandIn):
            raise RefusedError("sets the state of something that has none; nothing of the file has run")
        if isinstance(state, dict):
            target.attributes.update(self._counted(state))


def check_modules_named(names: Iterable[Any]) -> None:
    """Raise RefusedError for a network whose weights are another's, by name and shape, and whose layers are not."""
    known = set(map(str, names))
    if any(f"{name.removesuffix('skip_add')}conv" in known for name in known if name.endswith(".skip_add")):
        why = "is of torchvision's quantisable mobilenet_v2, whose ReLU is no ReLU6 as the plain one's"
        raise RefusedError(f"{why}: it is served from an export, torch.onnx.export")


def _list(target: Any) -> list[Any]:
    if not isinstance(target, list):
        raise RefusedError("appends to something that is not a list")
    return target


def _set_items(target: Any, items: list[Any]) -> None:
    # Module subclasses of dict or list do not exist in weight files, and only scalar keys can be hashed without depth.
    if not isinstance(target, dict) or len(items) % 2:
        raise RefusedError("sets items of something that is not a dictionary")
    keys = items[::2]
    if not all(key is None or isinstance(key, str | int | float) for key in keys):
        raise RefusedError("has a dictionary key that is neither text nor a number")
    target.update(zip(keys, items[1::2], strict=True))


def _stored_tensor(storage: Any, offset: Any, shape: Any, stride: Any) -> StoredTensor:
    if not isinstance(storage, Storage) or not isinstance(shape, tuple) or not isinstance(stride, tuple):
        raise RefusedError("has a tensor without storage, shape or stride")
    if (
        len(shape) != len(stride)
        or len(shape) > 8
        or not all(type(number) is int and 0 <= number < 1 << 48 for number in (offset, *shape, *stride))
    ):
        raise RefusedError("has a tensor of impossible shape")
    last = offset + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    count = math.prod(shape)
    # More elements than the storage has would make a later copy allocate what the file never contained.
    if count > storage.length or (count and last >= storage.length):
        raise RefusedError(f"has a tensor of shape {list(shape)} in a storage of {storage.length} elements")
    return StoredTensor(storage, offset, shape, stride)


class Archive:
    """A zip file of torch.save: `root` is the object described, `tensor` reads one of its tensors."""

    def __init__(self, path: Path) -> None:
        self._zip = zipfile.ZipFile(path)
        self._stem = path.stem
        try:
            self._entries = {info.filename.partition("/")[2]: info for info in self._zip.infolist()}
            self._storages: dict[str, Tensor] = {}
            self._unread_bytes = path.stat().st_size
            self.root = self._interpret()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the file."""
        self._zip.close()

    def tensor(self, record: StoredTensor) -> Tensor:
        """Return the tensor, read on first use of its storage and checked against the archive's checksum."""
        storage = record.storage
        if storage.key not in self._storages:
            content = bytearray(self._read(f"data/{storage.key}"))
            elements = torch.frombuffer(content, dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)
            self._storages[storage.key] = elements
        elements = self._storages[storage.key][: storage.length * storage.dtype.itemsize].view(storage.dtype)
        return elements.as_strided(record.shape, record.stride, record.offset)

    def _interpret(self) -> Any:
        is_program = any(name.endswith(_PROGRAM) for name in self._zip.namelist())
        if is_program or "constants.pkl" in self._entries:
            suffix = ".pt2" if is_program else ".ts"
            raise RefusedError(f"is a program, not weights: name it {self._stem}{suffix}, and it is served as one")
        if "data.pkl" not in self._entries:
            raise RefusedError("is a zip file but not one of torch.save")
        if "byteorder" in self._entries and self._read("byteorder") != b"little":
            raise RefusedError("was written on a big-endian machine")
        if self._entries["data.pkl"].file_size > MAX_PICKLE_BYTES:
            raise RefusedError(f"describes itself in more than {MAX_PICKLE_BYTES >> 20} MiB, as no weights file does")
        return interpret(self._read("data.pkl"), self._storage)

    def _read(self, name: str) -> bytes:
        """Read an entry. torch never compresses or overlaps entries, so no file holds more than its own size."""
        entry = self._entries[name]
        self._unread_bytes -= entry.file_size
        if entry.compress_type != zipfile.ZIP_STORED or self._unread_bytes < 0:
            raise RefusedError("is packed as torch.save never does")
        return self._zip.read(entry)

    def _storage(self, persistent_id: Any) -> Storage:
        match persistent_id:
            case ("storage", Name(path=path), str(key), str(), int(length)):
                pass
            case _:
                raise RefusedError("refers to something that is not a storage")
        dtype = _DTYPES.get(path.rpartition(".")[2])
        entry = self._entries.get(f"data/{key}")
        if dtype is None or entry is None or not 0 <= length * dtype.itemsize <= entry.file_size:
            raise RefusedError(f"has a storage of {length} elements that is not there")
        return Storage(key, dtype, length)
