"""Modules of a network that was saved whole: are they those of the architecture that computes in its place?

Owns: the comparison, by the modules' paths. A state dict has the same names and shapes for other activations, strides,
pools or a residual connection left out. Must not know files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from models.contract.errors import WeightsError

FACTS = (
    "add",
    "align_corners",
    "approximate",
    "ceil_mode",
    "count_include_pad",
    "dilation",
    "eps",
    "groups",
    "kernel_size",
    "mode",
    "negative_slope",
    "normalized_shape",
    "output_size",
    "padding",
    "padding_mode",
    "scale_factor",
    "stride",
)
"""Attributes by which modules of one class compute differently."""
_IN_TORCH = "torch.nn.modules."
_NO_LAYERS = ("container.", "dropout.", "loss.", "linear.Identity")
_OURS = {
    "upsampling.Upsample": {"scale_factor": 2.0, "mode": "nearest"},
    "activation.SiLU": {},
    "activation.Sigmoid": {},
}
"""Modules that our networks compute without one of their own, with their facts."""


@dataclass(frozen=True)
class SavedModule:
    """A module in a file: its class by name, and those of FACTS that it has."""

    name: str
    facts: Mapping[str, Any]


def check_modules(
    architecture: str, saved: Mapping[str, SavedModule], network: nn.Module, beside: Mapping[str, SavedModule]
) -> None:
    """Check the modules of a saved network against ours of the same paths. `beside`: others that may compute something
    before or after it. Raises WeightsError.
    """
    for path, module in beside.items():
        kind = module.name.removeprefix(_IN_TORCH)
        if kind != module.name and not kind.startswith(_NO_LAYERS):
            raise WeightsError(f"The network is more than {architecture}: its {path} is {_class(kind)}.")
    ours = dict(network.named_modules())
    for path, module in saved.items():
        own, parent = ours.get(path), path.rpartition(".")[0]
        if own is None and parent not in ours:  # Of a part that serves training alone.
            continue
        if said := _difference(module, own):
            raise WeightsError(f"The network is not {architecture}: its {path} {said}.")


def _difference(saved: SavedModule, own: nn.Module | None) -> str:
    """Say in which way a saved module computes otherwise than ours; "" if it does not, or nobody can tell."""
    kind = saved.name.removeprefix(_IN_TORCH)
    if kind == saved.name:  # A block of the library's own: its parts are compared, and its residual connection.
        residual, added = getattr(own, "residual", None), saved.facts.get("add")
        if residual is None or added is None or residual == added:
            return ""
        return "adds its input" if added else "does not add its input"
    if own is None:
        expected = _OURS.get(kind)
        if expected is None:
            return f"is {_class(kind)}" if kind.startswith("activation.") else ""
        wrong = {
            name: saved.facts[name] for name in expected if saved.facts.get(name, expected[name]) != expected[name]
        }
    elif kind.startswith(_NO_LAYERS) and not _computes(own):
        return ""
    elif _class(kind) != type(own).__name__:
        return f"is {_class(kind)} and not {type(own).__name__}"
    else:
        wrong = {name: each for name, each in saved.facts.items() if _differ(each, getattr(own, name, each))}
    return " and ".join(f"has {name} {each}" for name, each in wrong.items())


def _class(kind: str) -> str:
    return kind.rpartition(".")[2]


def _computes(module: nn.Module) -> bool:
    """Return True for a layer that changes what it is given."""
    return not isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict | nn.Dropout | nn.Identity)


def _differ(one: Any, other: Any) -> bool:
    """Return True for different values; one number stands for the same in every direction."""
    one, other = (tuple(each) if isinstance(each, tuple | list) else (each,) for each in (one, other))
    return len({*one, *other}) > 1 if 1 in (len(one), len(other)) else bool(one != other)
