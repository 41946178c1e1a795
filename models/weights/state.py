"""Checkpoints and networks: does what a file holds fit the architecture that computes in its place?

Owns: names and shapes of state dicts, and the modules of networks that were saved whole: a state dict has the same
names and shapes for other activations, strides, pools or a residual connection left out. Must not know an architecture.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from models.contract.errors import WeightsError
from models.contract.model import Model
from models.weights.checkpoint import OF_TRAINING, Checkpoint, SavedModule, read

State = Mapping[str, Tensor]
_MOST_PREFIXES = 16
_IN_TORCH = "torch.nn.modules."
_NO_LAYERS = ("container.", "dropout.", "loss.", "linear.Identity", "torchvision.ops.stochastic_depth.", "ultralytics.")
"""Beginnings of classes' names that change no answer. Layers of Ultralytics have weights, or join features."""
_UNCHANGED = (nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.Dropout, nn.Identity)


@dataclass(frozen=True)
class Fitted:
    """A checkpoint in an architecture's names, the network that it fits, on the meta device, and what is `assumed`."""

    found: Checkpoint
    class_count: int
    network: nn.Module
    assumed: str = ""


class SeveralNetworksError(WeightsError):
    """Refusal of a checkpoint that has the network several times, under prefixes."""


def fitted_within(found: Checkpoint, name: str, fitted: Callable[[Checkpoint], Fitted]) -> Fitted:
    """Fit a network, or the one within a larger one, which gives its names a prefix: `net.`, `student.`.

    `name`: of an entry that every such network has; `fitted`: raises WeightsError for a checkpoint that does not fit.
    Raises its errors, WeightsError for layers beside it, SeveralNetworksError if several prefixes have the network.
    """
    prefixes = sorted({each.removesuffix(name) for each in found.state if each.endswith(f".{name}")})
    fitting = {}
    for prefix in prefixes if name not in found.state and len(prefixes) <= _MOST_PREFIXES else ():
        with contextlib.suppress(WeightsError):
            fitting[prefix] = fitted(found.under(prefix))
    if len(fitting) > 1:
        names = ", ".join(repr(prefix) for prefix in fitting)
        raise SeveralNetworksError(
            f"the network is there {len(fitting)} times, its names under the prefixes {names}: save the state_dict() "
            "of the one to be served."
        )
    if not fitting:
        return fitted(found)
    [(prefix, fit)] = fitting.items()
    more = sorted(each for each in found.state if not each.startswith(prefix) and not OF_TRAINING.match(each))
    if listed := ", ".join(more[:3]):
        raise WeightsError(f"The network is a part of another one, under {prefix!r}, which also has {listed}.")
    return fit


def check_fits(architecture: str, state: State, expected: State) -> None:
    """Check a state dict's names and shapes against the expected ones; meta tensors suffice. Raises WeightsError."""
    for name in sorted(expected.keys() | state.keys()):
        if name.endswith(".num_batches_tracked"):
            continue  # counts training steps; some formats leave it out
        if name not in state:
            raise WeightsError(f"The weights are not of {architecture}: {name} is missing.")
        if name not in expected:
            raise WeightsError(f"The weights are not of {architecture}: it has no {name}.")
        if state[name].shape != expected[name].shape:
            found, wanted = (list(tensors[name].shape) for tensors in (state, expected))
            raise WeightsError(f"The weights are not of {architecture}: {name} is {found}, not {wanted}.")


def read_state(model: Model, fitted: Callable[[str, Checkpoint], Fitted]) -> Fitted:
    """Read a model's file, floats as float32, for as many classes as the model has labels.

    `fitted`: fits a checkpoint to an architecture. Raises WeightsError.
    """
    if model.weights_file is None:
        raise WeightsError(f"{model.name} names no weights file.")
    fit = fitted(model.architecture, read(Path(model.weights_file)))
    if fit.class_count != len(model.labels):
        raise WeightsError(
            f"{model.weights_file} has {fit.class_count} classes, but there are {len(model.labels)} labels."
        )
    state = fit.found.state.items()
    floats = {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in state}
    return replace(fit, found=replace(fit.found, state=floats))


def check_modules(
    architecture: str, saved: Mapping[str, SavedModule], network: nn.Module, beside: Mapping[str, SavedModule]
) -> None:
    """Check the modules of a saved network against ours of the same paths. `beside`: modules of the file outside it.

    A layer that only the file has changes the result, unless `computed` of our network has its like, or `unused` the
    beginning of its path. Raises WeightsError for the first difference.
    """
    ours, unused = dict(network.named_modules(remove_duplicate=False)), getattr(network, "unused", ())
    computed = {type(each).__name__: each for each in getattr(network, "computed", ())}
    more = dict(beside)
    for path, module in saved.items():
        own = ours.get(path, computed.get(_class(module.name)))
        if own is not None and (difference := _difference(module, own)):
            raise WeightsError(f"The network is not {architecture}: its {path} {difference}.")
        if own is None and not path.startswith(unused):
            more[path] = module
    for path, module in more.items():
        if not module.name.removeprefix(_IN_TORCH).startswith(_NO_LAYERS):
            raise WeightsError(f"The network is more than {architecture}: its {path} is {_class(module.name)}.")
    for path, own in ours.items():
        parent = path.rpartition(".")[0]
        is_in_a_row = parent in saved and isinstance(ours[parent], nn.Sequential)
        if is_in_a_row and path not in saved and not isinstance(own, _UNCHANGED):
            raise WeightsError(f"The network is not {architecture}: it has no {path}, a {type(own).__name__}.")


def _difference(saved: SavedModule, own: nn.Module) -> str:
    """Say in which way a saved module computes otherwise than ours; "" if it does not, or nobody can tell."""
    kind = saved.name.removeprefix(_IN_TORCH)
    if kind == saved.name:  # A block of the library's own: its parts are compared, and it, if it is ours too.
        residual, added = getattr(own, "residual", None), saved.facts.get("add")
        if None not in (residual, added) and residual != added:
            return "adds its input" if added else "does not add its input"
        if f"{type(own).__module__}.{type(own).__qualname__}" != kind:
            return ""
    elif kind.startswith(_NO_LAYERS) and isinstance(own, _UNCHANGED):
        return ""
    elif _class(kind) != type(own).__name__:
        return f"is {_class(kind)} and not {type(own).__name__}"
    wrong = {name: each for name, each in saved.facts.items() if _differ(each, vars(own).get(name, each))}
    return " and ".join(f"has {name} {each}" for name, each in wrong.items())


def _class(kind: str) -> str:
    return kind.rpartition(".")[2]


def _differ(one: Any, other: Any) -> bool:
    one, other = (tuple(each) if isinstance(each, tuple | list) else (each,) for each in (one, other))
    return len({*one, *other}) > 1 if 1 in (len(one), len(other)) else bool(one != other)


class WithoutValues(TorchFunctionMode):
    """Mode that builds networks with weights on the meta device: shapes without the seconds for initial values."""

    _RANDOM = (Tensor.normal_, Tensor.uniform_, Tensor.erfinv_)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        # Only `empty`, from which layers make their weights: RegNet computes its widths with tensors of its own.
        if func is torch.empty:
            return func(*args, **{**(kwargs or {}), "device": "meta"})
        if func in self._RANDOM:
            return args[0]
        return func(*args, **(kwargs or {}))
