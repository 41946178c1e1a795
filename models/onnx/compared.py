"""Comparison of each operator of a graph with another runtime's values for the same inputs.

    file ─► our graph, one call after another ─┐
    file ─► witness: its values by name ───────┴─► every call on the witness's inputs ─► the first that differs

Owns: that comparison, and the tolerance of numbers. If no operator differs by itself, the graph computes what the
witness does: the remaining difference is rounding, which a network may enlarge.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from models.contract.model import Array
from models.onnx.file import Node, OnnxFile
from models.onnx.graph import OnnxGraph, OperatorCall, computed
from models.onnx.operators import as_tensor, is_host
from models.onnx.session import Witness

_ALONE = 2e-5
"""Limit for one operator, as a share of its largest number: float32 errs by 1e-6, in sums of thousands."""
_ALONE_IN_HALVES = 5e-3
_ROUNDINGS = 32  # Factor of our own rounding, measured by computing the operator in float64, too.
_EPSILON = 2.0**-24  # Rounding of float32; a sum of n numbers in sequence errs by about sqrt(n) times as much.
_AT_ONCE, _MOST_AT_ONCE = 8, 256
"""Operators whose values are held: at first, and at most."""
_BYTES_AT_ONCE = 256 << 20  # Rough limit for their values; those of all operators may be gigabytes.
_NUMBERS = 1 << 20  # Numbers compared in float64 at once.
_GREATEST_HALF = 65504.0
_EDGE = 0.01  # Share of boxes whose suppression rounding alone may decide.


class DifferentError(ValueError):
    """Difference of an operator; the message says which and how."""


class _Values:
    """The witness's values, a few operators ahead."""

    def __init__(self, witness: Witness, given: Mapping[str, Array], order: Sequence[str]) -> None:
        self._witness, self._given = witness, given
        self._order = [name for name in order if name in witness.names]
        self._places = {name: place for place, name in enumerate(self._order)}
        self._held: dict[str, Array] = {}
        self._count = _AT_ONCE

    def get(self, name: str) -> Array | None:
        """Return a value, None if the witness does not give it."""
        place = self._places.get(name)
        if place is None:
            return None
        if name not in self._held:
            self._held = {}
            self._held = self._witness.values(self._given, self._order[place : place + self._count])
            mean_bytes = sum(each.nbytes for each in self._held.values()) // len(self._held)
            self._count = min(max(_AT_ONCE, _BYTES_AT_ONCE // max(1, mean_bytes)), _MOST_AT_ONCE)
        return self._held[name]


def _of_sums(operator: str, inputs: Sequence[Any], ours: Any) -> float:
    """Return the error, as a share of the result, of a witness that sums in sequence, where we sum in a tree."""
    if not operator.startswith(("Reduce", "GlobalAverage")) or not isinstance(ours, Tensor) or not ours.numel():
        return 0.0
    return float(_ROUNDINGS * _EPSILON * (as_tensor(inputs[0]).numel() / ours.numel()) ** 0.5)


class _ComparedGraph(OnnxGraph):
    """An OnnxGraph whose calls continue with the witness's values, and are compared with them; its constants are
    compared while they are computed.
    """

    def __init__(self, file: OnnxFile, name: str, values: _Values, *, in_halves: bool) -> None:
        self._values, self._alone = values, _ALONE_IN_HALVES if in_halves else _ALONE
        self._nodes_of = {name: node for node in file.nodes for name in node.outputs}
        super().__init__(file, name)
        self.core.instead = self.tail.instead = self._compared

    def _compared(self, call: OperatorCall, inputs: list[Any]) -> Any:
        found = computed(call, inputs)
        results = list(found) if isinstance(found, tuple) else [found]
        for place, (name, ours) in enumerate(zip(call.outputs, results, strict=False)):
            wanted = self._values.get(name)
            if wanted is None:
                continue
            reason = self._difference(call, inputs, place, ours, wanted)
            if reason:
                raise DifferentError(f"{_called(self._nodes_of[name])} {reason}")
            results[place] = _as(ours, wanted)
        return tuple(results)

    def _difference(self, call: OperatorCall, inputs: list[Any], place: int, ours: Any, wanted: Array) -> str:
        if call.operator == "NonMaxSuppression":
            return _of_boxes(as_tensor(ours), wanted)
        share = max(self._alone, _of_sums(call.operator, inputs, ours))
        reason = difference(ours, wanted, share)
        if not reason or not isinstance(ours, Tensor) or not ours.is_floating_point() or ours.shape != wanted.shape:
            return reason
        exact = computed(call, [_doubled(each) for each in inputs])
        exact = exact[place] if isinstance(exact, tuple) else exact
        rounding = float((exact - ours).abs().nan_to_num().max())
        return difference(exact, wanted, share, _ROUNDINGS * rounding)

    def _folded(self, node: Node, known: dict[str, Any]) -> bool:
        if not super()._folded(node, known):
            return False
        for name in node.outputs if node.operator != "Constant" else ():
            wanted = self._values.get(name)
            reason = "" if wanted is None else difference(known[name], wanted, self._alone)
            if reason:
                raise DifferentError(f"{_called(node)} {reason}")
        return True


def first_different(file: OnnxFile, name: str, given: Mapping[str, Array], witness: Witness) -> str:
    """Return the first operator in the order of computation that differs from the witness, and how; "" if none does.

    `name`: of the file, for errors. `given`: all inputs of the witness, by name. Raises WeightsError.
    """
    values = _Values(witness, given, [name for node in file.nodes for name in node.outputs])
    tensors = [torch.from_numpy(given[value.name]) for value in file.inputs]
    try:
        graph = _ComparedGraph(file, name, values, in_halves=witness.in_halves).eval()
        with torch.inference_mode():
            graph(*(each.float() if each.is_floating_point() else each for each in tensors))
    except DifferentError as error:
        return str(error)
    return ""


def difference(ours: Any, wanted: Array, share: float, rounding: float = 0.0) -> str:
    """Describe how a value differs from the wanted one, "" if it does not.

    Floats may differ by `share` of the largest number, and by `rounding`.
    """
    found = as_tensor(ours)
    given = found.numpy() if not is_host(ours) or wanted.size != found.numel() else found.numpy().reshape(wanted.shape)
    if given.shape != wanted.shape:
        return f"has the shape {list(given.shape)}, and not {list(wanted.shape)}"
    if wanted.dtype.kind != "f":
        count = int((given != wanted).sum())
        return f"has {count} other numbers of {given.size}" if count else ""
    largest = magnitude = 0.0
    flat, reference = np.ravel(given), np.ravel(wanted)
    for first in range(0, reference.size, _NUMBERS):
        one, other = (each[first : first + _NUMBERS].astype(np.float64) for each in (flat, reference))
        if wanted.dtype == np.float16:  # The largest number of float16 is _GREATEST_HALF.
            one = np.where(np.abs(one) > _GREATEST_HALF, np.copysign(np.inf, one), one)
        finite = np.isfinite(other)
        if not np.array_equal(one[~finite], other[~finite], equal_nan=True) or not np.isfinite(one[finite]).all():
            return "is not finite in the same places"
        if finite.any():
            magnitude = max(magnitude, float(np.abs(other[finite]).max()))
            largest = max(largest, float(np.abs(one[finite] - other[finite]).max()))
    if largest <= share * magnitude + rounding:
        return ""
    return f"differs by {largest:.3g} in numbers of up to {magnitude:.3g}"


def _of_boxes(ours: Tensor, wanted: Array) -> str:
    one, other = ({tuple(row) for row in rows.tolist()} for rows in (ours, wanted))
    count = len(one ^ other)
    return f"chooses {count} other boxes of {len(other)}" if count > _EDGE * len(other) else ""


def _called(node: Node) -> str:
    return f"{node.operator} {node.name or node.outputs[0]!r}"


def _doubled(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def _as(ours: Any, wanted: Array) -> Any:
    """Convert the witness's value to the kind of ours."""
    if isinstance(ours, Tensor):
        return torch.from_numpy(wanted).to(ours.dtype)
    return wanted.reshape(-1).tolist() if isinstance(ours, list) else wanted.reshape(-1).tolist()[0]
