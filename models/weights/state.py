"""State dicts: their fit to a network, and reading them from a model's file.

Owns: these checks. Must not know an architecture.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor, nn

from models.contract.errors import WeightsError
from models.contract.model import Model
from models.weights.checkpoint import Checkpoint, read

State = Mapping[str, Tensor]
_MOST_PREFIXES = 16


@dataclass(frozen=True)
class Fitted:
    """A checkpoint in the names of an architecture, and the network that it fits, on the meta device."""

    found: Checkpoint
    class_count: int
    network: nn.Module


class SeveralNetworksError(WeightsError):
    """Refusal of a checkpoint that has the network several times, under prefixes."""


def fitted_within(found: Checkpoint, name: str, fitted: Callable[[Checkpoint], Fitted]) -> Fitted:
    """Fit a network, or the one within a larger one, which gives its names a prefix: `net.`, `student.`.

    `name`: of an entry that every such network has; `fitted`: raises WeightsError for a checkpoint that does not fit.
    Raises its errors, and SeveralNetworksError if several prefixes have the network.
    """
    prefixes = sorted({each.removesuffix(name) for each in found.state if each.endswith(f".{name}")})
    fitting = {}
    for prefix in prefixes if name not in found.state and len(prefixes) <= _MOST_PREFIXES else ():
        with contextlib.suppress(WeightsError):
            fitting[prefix] = fitted(found.under(prefix))
    if len(fitting) > 1:
        said = ", ".join(repr(prefix) for prefix in fitting)
        raise SeveralNetworksError(
            f"the network is there {len(fitting)} times, its names under the prefixes {said}: save the state_dict() of "
            "the one to be served."
        )
    return next(iter(fitting.values())) if fitting else fitted(found)


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
