"""Reader of weight files: tensors, labels, metadata.

Owns: the file formats (safetensors, torch.save in both its forms, official YOLOv8 files), finding labels, and one clear
WeightsError for every fault of a file. Must not know architectures, and never runs anything a file contains.
"""

from __future__ import annotations

import codecs
import contextlib
import json
import pickle
import re
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from models.contract.errors import WeightsError, WeightsNotFoundError
from models.contract.files import CUT_SHORT, begins_as_archive, read_regular
from models.weights.unpickle import Archive, RefusedError, StandIn, StoredTensor, check_modules_named, foreign

_Value = TypeVar("_Value")

SUFFIXES = (".safetensors", ".pt", ".pth")
MAX_NAME_LENGTH = 512
MAX_MODULES = 100_000
MAX_ENTRIES = 200_000  # For all modules together; YOLOv8x, the largest official file, has 2,000.

_MAX_DIRECTIONS = 8
_MOST_DEPTH = 8
"""Most state dicts within each other's entries."""
_SAFE_LOAD = (2, 10)
_READ = (*SUFFIXES, ".ckpt", ".tar", ".bin")
"""Suffixes of a named file: those that trainers give to files of torch.save."""
_OF_CUT = re.compile("(?i)not fully covered|incompletebuffer|invalid ?header ?length|header ?too ?small")  # safetensors
_WRAPPERS = ("module.", "_orig_mod.", "model.")
"""Prefixes that DataParallel, torch.compile and Lightning put before every name."""
OF_TRAINING = re.compile(
    r"(.*\.)?(n_averaged$|(\w+_)?(loss|criterion)|metrics\.|(class|pos)_weights?$|(train|val|valid|test)_)"
)
"""Beginnings of names of values that trainers keep beside a network."""
_ULTRALYTICS = re.compile(r"model\.\d+\.")
_STATE_KEYS = ("ema", "state_dict_ema", "model_ema", "ema_state_dict", "model", "state_dict", "model_state_dict")
"""Keys of state dicts in the order of choice: averaged weights before those of the last step, as in timm."""
_WITHIN = re.compile(r"(?<=\.)(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
"""Names that wrappers of a part of a network put into those of its entries."""
_WITHOUT_NAMES = (
    "holds averages of weights without their names ('shadow_params'): save those of your network, "
    "ema.copy_to(network.parameters()), torch.save(network.state_dict(), …), or the last step's state dict alone"
)
_EXPORT = 'serve its export (yolo export format=onnx), with "resize", "mean" and "std" of these steps beside it'
SAVE_ONE = "save one of them, torch.save(checkpoint[…], …)"
_UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
LABELS = ("{}.labels.txt", "{}.txt", "{}.json", "labels.txt", "labels.json")
_LABEL_KEYS = ("labels", "names", "classes", "class_names")
_SAFETENSORS_DTYPES = {
    **{f"F{bits}": getattr(torch, f"float{bits}") for bits in (16, 32, 64)},
    **{f"I{bits}": getattr(torch, f"int{bits}") for bits in (8, 16, 32, 64)},
    "BF16": torch.bfloat16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NOT_IN_ANSWERS = frozenset(
    ("attention_dropout", "aux_logits", "dropout", "inplace", "momentum", "num_classes", "p", "training")
)
"""Attributes that change no answer; a head that was replaced leaves its network's old number of classes."""


@dataclass(frozen=True)
class SavedModule:
    """A module in a file: its class by name, and its numbers, words and short lists, by which it may compute."""

    name: str
    facts: Mapping[str, Any]


@dataclass(frozen=True)
class Checkpoint:
    """Content of a weight file: tensors by name in the file's own precision, labels if it has them; for a network that
    was saved whole, its modules by their paths, and those `beside` it. `chosen`: keys of state dicts if the file has
    several, first that of this one.
    """

    state: dict[str, Tensor]
    labels: tuple[str, ...] | None = None
    metadata: dict[str, str] = field(default_factory=dict)
    modules: Mapping[str, SavedModule] = field(default_factory=dict)
    beside: Mapping[str, SavedModule] = field(default_factory=dict)
    chosen: tuple[str, ...] = ()

    def under(self, prefix: str) -> Checkpoint:
        """Return what the names with a prefix have, without it."""
        others = {name: each for name, each in self.modules.items() if not f"{name}.".startswith(prefix)}
        beside = {**self.beside, **others}
        modules = _under(prefix, self.modules)
        root = self.modules.get(prefix.removesuffix("."))
        if root is not None and not root.name.startswith("torch.nn."):  # A container says nothing of what is in it.
            modules[""] = root
        return replace(self, state=_under(prefix, self.state), modules=modules, beside=beside)


def labels_beside(path: Path) -> tuple[str, ...] | None:
    """Read labels from a file in the same directory, None if there is none.

    The names, in order: `<stem>.labels.txt`, `<stem>.txt`, `<stem>.json`, `labels.txt`, `labels.json`. Text has one
    label a line; JSON is a list or an object {"0": "cat", …}, `labels.json` also {"cat": 0, …}. Raises WeightsError.
    """
    stems = path.stem, path.stem.removesuffix(".pth")  # Of `model_best.pth.tar` both.
    for name in [each.format(stem) for each in LABELS for stem in stems]:
        content = read_regular(path.with_name(name))
        if content is None:
            continue
        try:
            text = content.decode("utf-16" if content[:2] in _UTF_16 else "utf-8-sig")
            if name.endswith(".txt"):
                return tuple(line.strip() for line in text.strip().splitlines())
            found = json.loads(text)
            labels = _label_tuple(_by_number(found) if name == "labels.json" else found)
        except UnicodeDecodeError:
            raise WeightsError(f"{name}, the labels beside {path.name}, is no UTF-8: save it as UTF-8.") from None
        except (ValueError, RecursionError) as error:
            raise WeightsError(f"{name}, the labels beside {path.name}, cannot be read: {error}.") from error
        if labels is not None:
            return labels
        if name == "labels.json":
            raise WeightsError(f"{name} beside {path.name} is neither a list of labels nor an object of them.")
    return None


def read(path: Path, *, with_data: bool = True) -> Checkpoint:
    """Read everything in the file, on the CPU; without data in milliseconds, with tensors on the meta device.

    Labels come from a file beside the weights (`labels_beside`), else from the file's own metadata. Raises
    WeightsNotFoundError, WeightsError.
    """
    if not path.is_file():
        raise WeightsNotFoundError(f"There is no weights file {path}.")
    if path.suffix not in _READ:
        raise WeightsError(f"{path.name} is not a weights file of a known kind ({', '.join(SUFFIXES)}).")
    try:
        if path.suffix == ".safetensors":
            found = _read_safetensors(path, with_data)
        elif zipfile.is_zipfile(path):
            found = _read_archive(path, with_data)
        elif begins_as_archive(path):
            raise RefusedError(CUT_SHORT)
        else:
            found = _read_legacy(path)
    except RefusedError as error:
        raise WeightsError(f"{path.name} {error}.") from error
    except OSError as error:
        raise WeightsError(f"{path.name} cannot be read: {error.strerror or error}.") from error
    except Exception as error:  # a broken file can make the three libraries raise anything
        is_cut = isinstance(error, SafetensorError) and _OF_CUT.search(str(error))
        why = CUT_SHORT if is_cut else "is corrupt, cut short, or not a weights file"
        raise WeightsError(f"{path.name} {why}.") from error
    if not found.state:
        raise WeightsError(f"{path.name} holds no tensors.")
    for name, tensor in found.state.items() if with_data else ():
        if tensor.is_floating_point() and tensor.isnan().any():
            raise WeightsError(f"{path.name} cannot be used: its {name} holds NaN, as after a training that diverged.")
    return replace(_unwrapped(found), labels=labels_beside(path) or found.labels)


def _read_safetensors(path: Path, with_data: bool) -> Checkpoint:
    with safe_open(path, framework="pt") as file:
        state = {}
        for name in file.keys():  # noqa: SIM118 (the handle is not a mapping)
            if with_data:
                state[name] = file.get_tensor(name).clone()  # the file may be overwritten while it is mapped
                continue
            view = file.get_slice(name)
            dtype = _SAFETENSORS_DTYPES.get(view.get_dtype())
            if dtype is None:
                raise RefusedError(f"has a tensor of type {view.get_dtype()}, which is not read")
            state[name] = torch.empty(view.get_shape(), dtype=dtype, device="meta")
        metadata = dict(file.metadata() or {})
    try:
        labels = _label_tuple(json.loads(metadata.pop("labels", "null")))
    except ValueError as error:
        raise RefusedError("has labels in its metadata that are not JSON") from error
    return Checkpoint(state, labels, metadata)


def _read_archive(path: Path, with_data: bool) -> Checkpoint:
    with contextlib.closing(Archive(path)) as archive:
        saved, chosen = _saved(archive.root)
        entries, modules = _of_module(saved) if isinstance(saved, StandIn) else (saved, {})
        records = {name: value for name, value in entries.items() if isinstance(value, StoredTensor)}
        state = {
            name: archive.tensor(record)
            if with_data
            else torch.empty_strided(record.shape, record.stride, dtype=record.storage.dtype, device="meta")
            for name, record in records.items()
        }
        root = archive.root
        return Checkpoint(state, _labels(root), _metadata(root, archive), modules, chosen=chosen)


def _read_legacy(path: Path) -> Checkpoint:
    """Read the format of torch.save before 1.6, which some torchvision files still have.

    torch itself unpickles this format. Before 2.6 and 2.10 a file could make torch run code despite `weights_only`
    (CVE-2025-32434, CVE-2026-24747), so an older torch reads none.
    """
    # Vendors' builds append more: 2.9.0a0+git1234.
    if tuple(int(part) for part in re.findall(r"\d+", torch.__version__)[:2]) < _SAFE_LOAD:
        raise RefusedError("is of the format before torch 1.6, which torch before 2.10 cannot read safely")
    try:
        root = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        named = re.search(r"GLOBAL ([\w.]+)", str(error))
        if named is None:
            raise
        raise foreign(named[1]) from error
    saved, chosen = _saved(root)
    check_modules_named(getattr(saved, "_metadata", ()))
    tensors = {name: value for name, value in saved.items() if isinstance(value, Tensor)}
    size = path.stat().st_size
    if any(tensor.numel() * tensor.element_size() > size for tensor in tensors.values()):
        raise RefusedError("has a tensor that is larger than the file")
    state = {name: tensor.detach() for name, tensor in tensors.items()}
    return Checkpoint(state, _labels(root), chosen=chosen)


def _saved(root: Any, several: tuple[str, ...] = (), depth: int = 0) -> tuple[Any, tuple[str, ...]]:
    """Return the state dict or module, and the keys of `_chosen` where it chose first; () without a choice."""
    if depth > _MOST_DEPTH:
        raise RefusedError("describes a network without end")
    if isinstance(root, StandIn):
        return root, several
    if not isinstance(root, Mapping):
        raise RefusedError("holds no state dict")
    held = [root, *root.values(), *_mapping(root.get("callbacks")).values()]
    if any(isinstance(each, Mapping) and isinstance(each.get("shadow_params"), list | tuple) for each in held):
        raise RefusedError(_WITHOUT_NAMES)
    if chosen := _chosen(root):
        return _saved(root[chosen[0]], several or (chosen if chosen[1:] else ()), depth + 1)
    if not all(isinstance(name, str) and len(name) <= MAX_NAME_LENGTH for name in root):
        raise RefusedError("holds no state dict")
    return root, several


def _chosen(root: Mapping[Any, Any]) -> tuple[str, ...]:
    """Return the keys of state dicts and modules in a checkpoint, first the chosen one; () if it is one of them itself.

    Raises RefusedError if nothing tells which of several to choose.
    """
    counts: dict[int, int] = {}
    held = [key for key in _STATE_KEYS if isinstance(root.get(key), StandIn | Mapping)]
    found = [key for key in held if _most(root[key], counts)]  # Others are settings, or averages that never began.
    if found:
        # Averages of parameters alone lack what BatchNorm has measured.
        measured = {key: _most(root[key], {}, ".running_mean") for key in found if isinstance(root[key], Mapping)}
        if any(measured.values()):
            found.sort(key=lambda key: measured.get(key) == 0)
    least = 0 if found else _count(root)
    for value in root.values():
        if not least and isinstance(value, Mapping) and isinstance(value.get("weight"), StoredTensor | Tensor):
            counts[id(value)] = 1  # A layer by itself: the names of its tensors have no dot.
    named = [key for key in root if isinstance(key, str) and not OF_TRAINING.match(key)]
    others = [key for key in named if _most(root[key], counts) > least]
    if found:
        return (*found, *(key[:50] for key in others[:9] if key not in found and key.isidentifier()))
    if len(others) > 1:
        listed = ", ".join(repr(key[:50]) for key in others[:9])
        raise RefusedError(f"holds several networks, under {listed}: {SAVE_ONE}")
    return tuple(others if others or least else held)


def _most(value: Any, counts: dict[int, int], end: str = "") -> int:
    """Return `_count` of a state dict, or of the largest within a mapping; `counts`: what is known, by `id`."""
    if id(value) not in counts:
        counts[id(value)] = 0  # A pickle names one as often as it likes, even within itself.
        within = value.values() if isinstance(value, Mapping) else ()
        counts[id(value)] = _count(value, end) or max((_most(each, counts, end) for each in within), default=0)
    return counts[id(value)]


def _count(value: Any, end: str = "") -> int:
    """Return the number of tensors of layers in a state dict whose names end so; 1 for a module that has children."""
    if isinstance(value, StandIn):
        return int(bool(value.attributes.get("_modules")))
    entries = value.items() if isinstance(value, Mapping) else ()
    return sum(
        isinstance(name, str) and "." in name and name.endswith(end) and isinstance(tensor, StoredTensor | Tensor)
        for name, tensor in entries
    )


def _of_module(module: StandIn) -> tuple[dict[str, Any], dict[str, SavedModule]]:
    """Return what `state_dict()` of the pickled module would return, and its modules by their paths."""
    state: dict[str, Any] = {}
    modules: dict[str, SavedModule] = {}
    todo = [("", module)]
    visited = entries = 0
    while todo:
        prefix, current = todo.pop()
        attributes = current.attributes
        parameters, buffers = _mapping(attributes.get("_parameters")), _mapping(attributes.get("_buffers"))
        children = _mapping(attributes.get("_modules"))
        hidden = attributes.get("_non_persistent_buffers_set")
        hidden = hidden if isinstance(hidden, list) else []
        visited += 1
        entries += 1 + len(parameters) + len(buffers) + len(children) + len(hidden) + len(attributes)
        # A pickle can name the same object repeatedly, even within itself.
        if len(prefix) > MAX_NAME_LENGTH or visited > MAX_MODULES or entries > MAX_ENTRIES:
            raise RefusedError("describes a network without end")
        named = (name for name in attributes if isinstance(name, str) and name[:1] != "_")
        facts = {name: attributes[name] for name in named if name not in _NOT_IN_ANSWERS and _is_fact(attributes[name])}
        modules[prefix.removesuffix(".")] = SavedModule(current.name, facts)
        unsaved = {name for name in hidden if isinstance(name, str)}
        for name, value in (*parameters.items(), *buffers.items()):
            if isinstance(value, StoredTensor) and name not in unsaved:
                state[f"{prefix}{name}"] = value
        for name, child in children.items():
            if isinstance(child, StandIn):
                todo.append((f"{prefix}{name}.", child))
    return state, modules


def _is_fact(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return len(value) <= _MAX_DIRECTIONS and all(isinstance(each, int | float | str) for each in value)
    return isinstance(value, int | float | str)


def _mapping(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        return {}
    if any(len(name) > MAX_NAME_LENGTH for name in value):
        raise RefusedError("describes a network without end")
    return value


def _unwrapped(found: Checkpoint) -> Checkpoint:
    """Remove the names of training wrappers, in any order, and the values beside the network."""
    if any(_WITHIN.search(name) for name in found.state):
        found = replace(found, state={_WITHIN.sub("", name): tensor for name, tensor in found.state.items()})
    for wrapper in _WRAPPERS:
        of_network = [name for name in found.state if not OF_TRAINING.match(name)]
        wrapped = bool(of_network) and all(name.startswith(wrapper) for name in of_network)
        if wrapped and not all(_ULTRALYTICS.match(name) for name in of_network):
            return _unwrapped(found.under(wrapper))
    return found


def _under(prefix: str, entries: Mapping[str, _Value]) -> dict[str, _Value]:
    return {name.removeprefix(prefix): value for name, value in entries.items() if name.startswith(prefix)}


def _labels(root: Any) -> tuple[str, ...] | None:
    holders = [root, *(root.get(key) for key in _STATE_KEYS)] if isinstance(root, Mapping) else [root]
    for holder in holders:
        values = holder.attributes if isinstance(holder, StandIn) else holder
        if not isinstance(values, Mapping):
            continue
        for key in _LABEL_KEYS:
            labels = _label_tuple(values.get(key))
            if labels is not None:
                return labels
        if labels := _label_tuple(_by_number(values.get("class_to_idx"))):
            return labels
    return None


def _by_number(numbers: Any) -> Any:
    if not isinstance(numbers, Mapping) or not all(isinstance(each, int) for each in numbers.values()):
        return numbers
    found = {number: name for name, number in numbers.items()}
    return found if len(found) == len(numbers) else None


def _label_tuple(value: Any) -> tuple[str, ...] | None:
    if isinstance(value, Mapping):
        try:
            by_number = {int(number): label for number, label in value.items()}
        except (TypeError, ValueError):
            return None
        if sorted(by_number) != list(range(len(value))):
            return None
        value = [by_number[number] for number in range(len(by_number))]
    if not isinstance(value, list | tuple) or not value or not all(isinstance(label, str) for label in value):
        return None
    return tuple(value)


def _metadata(root: Any, archive: Archive) -> dict[str, str]:
    if not isinstance(root, Mapping):
        return {}
    side = _mapping(root.get("train_args")).get("imgsz")
    found, side = ({"imgsz": str(side)}, side) if isinstance(side, int) else ({}, 224)  # As published classifiers.
    holder = next((root[key] for key in _STATE_KEYS if isinstance(root.get(key), StandIn)), None)
    if holder is not None:
        described = _mapping(holder.attributes.get("yaml"))
        found |= {"network": holder.name, "yaml_file": str(described.get("yaml_file", ""))[:MAX_NAME_LENGTH]}
        shape = described.get("kpt_shape")
        if isinstance(shape, list) and len(shape) == 2 and all(isinstance(each, int) for each in shape):
            found["keypoints"] = f"{shape[0]},{shape[1]}"
        if isinstance(composed := holder.attributes.get("transforms"), StandIn):
            steps = [_step(each, archive) for each in composed.attributes["transforms"]]
            ends = ["CenterCrop", (side, side)], ["ToTensor"], ["Normalize", [0.0] * 3, [1.0] * 3]
            # Ultralytics takes these where they begin with its input's size, else its own.
            if steps[0][1:2] in ([], [side], [(side, side)]) and steps != [["Resize", side, "bilinear"], *ends]:
                raise RefusedError(f"prepares images by steps of its own, {str(steps)[:300]}: {_EXPORT}")
    return found


def _step(step: StandIn, archive: Archive) -> list[Any]:
    values = [step.attributes.get(name) for name in ("size", "max_size", "interpolation", "mean", "std")]
    found = [archive.tensor(each).tolist() if isinstance(each, StoredTensor) else each for each in values if each]
    return [step.name.removeprefix("torchvision.transforms.transforms."), *found]
