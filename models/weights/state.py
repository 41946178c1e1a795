"""State dicts: their fit to a network, and reading them from a model's file.

Owns: these checks. Must not know an architecture.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from torch import Tensor

from models.contract.errors import WeightsError
from models.contract.model import Model
from models.weights.checkpoint import read

State = Mapping[str, Tensor]
_MOST_PREFIXES = 16


class SeveralNetworksError(WeightsError):
    """Refusal of a state dict that has the network several times, under prefixes."""


def unprefixed(state: State, name: str, fits: Callable[[State], bool]) -> State:
    """Return the entries of the network within a larger one, which gives their names a prefix: `net.`, `student.`.

    `name`: of an entry that every such network has; `fits`: whether a state dict is one. The state itself is returned
    if it has the name, or no prefix fits. Raises SeveralNetworksError if several do.
    """
    prefixes = sorted({each.removesuffix(name) for each in state if each.endswith(f".{name}")})
    if name in state or len(prefixes) > _MOST_PREFIXES:
        return state
    fitting = {}
    for prefix in prefixes:
        within = {each.removeprefix(prefix): tensor for each, tensor in state.items() if each.startswith(prefix)}
        if fits(within):
            fitting[prefix] = within
    if len(fitting) > 1:
        said = ", ".join(repr(prefix) for prefix in fitting)
        raise SeveralNetworksError(
            f"the network is there {len(fitting)} times, its names under the prefixes {said}: save the state_dict() of "
            "the one to be served."
        )
    return next(iter(fitting.values()), state)


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


def read_state(model: Model, class_count: Callable[[str, State], int]) -> dict[str, Tensor]:
    """Read the state dict in a model's file, floats as float32, for as many classes as the model has labels.

    `class_count`: of an architecture's state dict. Raises WeightsError.
    """
    if model.weights_file is None:
        raise WeightsError(f"{model.name} names no weights file.")
    state = read(Path(model.weights_file)).state
    count = class_count(model.architecture, state)
    if count != len(model.labels):
        raise WeightsError(f"{model.weights_file} has {count} classes, but there are {len(model.labels)} labels.")
    return {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in state.items()}
