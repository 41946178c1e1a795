"""Trial of a network file: its inputs, its outputs, and whether it keeps to the rules of batches.

    signature of the file + what its owner declares ─► inputs ─► runs of several sizes ─► outputs, or one sentence

Owns: those rules. Shapes of outputs are observed, not believed: an axis that grows with the batch is the batch. Runs in
a process of its own (models.exports.child): must not be imported by the server.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from models.contract.errors import WeightsError, reason_of
from models.contract.model import Array
from models.contract.tensors import DATATYPES, Form, TensorSpec, random_arrays
from models.exports.answers import TriedTensors
from models.exports.networks import Graph, GraphSignature, Length, datatype_of_tensor, load_graph, output_names

_GREATEST_BATCH = 2**31 - 1
_MOST_TENSORS, _LONGEST_NAME = 1000, 512  # Lists and answers hold them, for any client that asks.
_AGREEMENT = 1e-3  # As a share of the largest number: far above rounding, far below another item's answer.


class _Trial:
    def __init__(self, file: str, graph: Graph, declared: Mapping[str, Any]) -> None:
        self.name, self.graph, self.declared = Path(file).name, graph, declared
        self.beside = f"{Path(file).stem}.tensors.json"
        self.signature: GraphSignature = graph.signature
        self.least: dict[str, int] = {}  # Lengths of named dimensions that the file takes.

    def inputs(self) -> tuple[tuple[TensorSpec, ...], bool, tuple[int, int]]:
        """Return the inputs, whether there are batches, and the sizes stated for them. Raises WeightsError."""
        unknown = self.declared["inputs"].keys() - set(self.signature.names)
        if unknown:
            names = ", ".join(self.signature.names)
            raise WeightsError(f"{self.beside} declares {', '.join(sorted(unknown))}, but {self.name} takes {names}.")
        if not self.signature.names:
            raise WeightsError(f"{self.name} takes no inputs: there is nothing to ask it.")
        shapes = {name: self._shape(index) for index, name in enumerate(self.signature.names)}
        batched = self.declared["batched"]
        if batched is None:
            batched = all(shape and not isinstance(shape[0], int) for shape in shapes.values())
        sizes = (1, _GREATEST_BATCH)
        if batched:
            fixed = [name for name, shape in shapes.items() if not shape or isinstance(shape[0], int)]
            if fixed:
                raise WeightsError(f"the first axis of {fixed[0]} in {self.name} is no batch: its length is fixed.")
            for shape in self.signature.shapes:  # The file's own names, whatever its owner calls them.
                low, high = self.signature.ranges.get(str(shape[0]), sizes) if shape else sizes
                sizes = max(sizes[0], low), min(sizes[1], high)
        specs = [
            self._spec(index, name, shapes[name][1:] if batched else shapes[name])
            for index, name in enumerate(self.signature.names)
        ]
        return tuple(specs), batched, sizes

    def _shape(self, index: int) -> Sequence[Length]:
        name, found = self.signature.names[index], self.signature.shapes[index]
        stated = self.declared["inputs"].get(name, {}).get("shape")
        if stated is None and found is None:
            raise WeightsError(f"{self.name} does not say what {name} is: state datatype and shape in {self.beside}.")
        if stated is None:
            return found or ()
        lengths: list[Length] = [None if length == -1 else length for length in stated]
        if found is not None:
            fits = len(found) == len(lengths) and all(
                not isinstance(have, int) or have == want for have, want in zip(found, lengths, strict=True)
            )
            if not fits:
                raise WeightsError(f"{name} in {self.name} has the shape {list(found)}, not {stated}.")
        return lengths

    def _spec(self, index: int, name: str, shape: Sequence[Length]) -> TensorSpec:
        declared = self.declared["inputs"].get(name, {})
        datatype = self.signature.datatypes[index] or declared.get("datatype")
        if datatype is None:
            raise WeightsError(f"{self.name} does not say of which type {name} is: state it in {self.beside}.")
        if declared.get("datatype") not in (None, datatype):
            raise WeightsError(f"{name} in {self.name} is {datatype}, not {declared['datatype']}.")
        if datatype not in DATATYPES:
            raise WeightsError(f"{name} in {self.name} is {datatype}: export it as {', '.join(DATATYPES)}.")
        lengths, dimensions = [], []
        own = (self.signature.shapes[index] or ())[-len(shape) :] if shape else ()
        for axis, length in enumerate(shape):
            if isinstance(length, int):
                lengths.append(length)
                dimensions.append("")
                continue
            stated = self.declared["dimensions"].get(length) if length else None
            if stated is None:
                how = f'{{"dimensions": {{"{length}": 128}}}}' if length else f"the shape of {name}"
                raise WeightsError(f"{self.name} leaves an axis of {name} open: state it in {self.beside}, {how}.")
            lengths.append(stated if isinstance(stated, int) else stated["at_most"])
            dimensions.append("" if isinstance(stated, int) else str(length))
            low, _ = self.signature.ranges.get(str(own[axis]), (1, 0)) if own else (1, 0)
            self.least[str(length)] = max(low, self.least.get(str(length), 1))
        if 0 in lengths:
            raise WeightsError(f"{name} in {self.name} has an axis of length 0.")
        limits = declared.get("range")
        named = tuple(dimensions) if any(dimensions) else ()
        return TensorSpec(name, datatype, tuple(lengths), named, None if limits is None else (limits[0], limits[1]))

    def run(self, arrays: Mapping[str, Array], batched: bool) -> tuple[Tensor, ...]:
        items = (array if batched else array[0] for array in arrays.values())
        tensors = [torch.from_numpy(np.array(item, order="C")) for item in items]
        try:
            with torch.inference_mode():
                outputs: tuple[Tensor, ...] = self.graph(*tensors)
        except Exception as error:
            shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in zip(arrays, tensors, strict=True))
            raise WeightsError(f"{self.name} does not run on {shapes}: {reason_of(error)}.") from error
        strange = [output for output in outputs if not isinstance(output, Tensor)]
        if strange or not outputs:
            raise WeightsError(f"{self.name} does not answer with tensors.")
        return outputs

    def names(self, count: int) -> tuple[str, ...]:
        names = self.declared["outputs"] or self.signature.outputs or output_names(tuple(range(count)))
        if len(names) != count:
            raise WeightsError(f"{self.name} has {count} outputs, and {len(names)} names for them.")
        return tuple(names)


def tried(file: str, form: Form, declared: Mapping[str, Any]) -> TriedTensors:
    """Find the facts for ExportedModel by running a file. Raises WeightsError."""
    trial = _Trial(file, load_graph(file, form), declared)
    inputs, batched, (low, high) = trial.inputs()
    whole = random_arrays(inputs, 3)
    if not batched:
        outputs = trial.run(whole, batched=False)
        sizes = (1, 1)
    else:
        # torch.export states 2 for networks that take 1 as well.
        if low <= 2:
            try:
                trial.run(_first(whole, 1), batched=True)
                low = 1
            except WeightsError:
                low = 2
        sizes = (low, high)
        outputs = _of_batch(trial, whole, sizes)
    names = trial.names(len(outputs))
    axes = _dimensions(trial, inputs, whole, outputs, batched)
    results = []
    for name, output, dimensions in zip(names, outputs, axes, strict=True):
        datatype = datatype_of_tensor(output)
        if datatype not in DATATYPES:
            raise WeightsError(f"{name}, an output of {trial.name}, is {datatype}, which cannot be served.")
        results.append(TensorSpec(name, datatype, tuple(output.shape[1:] if batched else output.shape), dimensions))
    every = [*inputs, *results]
    if len(every) > _MOST_TENSORS or any(len(each.name) > _LONGEST_NAME for each in every):
        raise WeightsError(f"{trial.name} has over {_MOST_TENSORS} tensors, or names over {_LONGEST_NAME} long.")
    return TriedTensors(inputs, tuple(results), batched, sizes)


def _first(arrays: Mapping[str, Array], count: int) -> dict[str, Array]:
    return {name: np.resize(array, (count, *array.shape[1:])) for name, array in arrays.items()}


def _of_batch(trial: _Trial, arrays: Mapping[str, Array], sizes: tuple[int, int]) -> tuple[Tensor, ...]:
    low, high = sizes
    if high <= low:
        raise WeightsError(f"{trial.name} takes batches of {low} only: declare it as it is, with a fixed first axis.")
    small = trial.run(_first(arrays, low), batched=True)
    large = trial.run(_first(arrays, low + 1), batched=True)
    for number, (one, more) in enumerate(zip(small, large, strict=True)):
        if not one.ndim or not more.ndim or (len(one), len(more)) != (low, low + 1) or one.shape[1:] != more.shape[1:]:
            raise WeightsError(
                f'output {number} of {trial.name} has no batch: state "batched": false in {trial.beside}.'
            )
        if not _close(one, more[:low]):
            raise WeightsError(f'items of {trial.name} affect each other: state "batched": false in {trial.beside}.')
    return large


def _dimensions(
    trial: _Trial, inputs: Sequence[TensorSpec], arrays: Mapping[str, Array], outputs: Sequence[Tensor], batched: bool
) -> list[tuple[str, ...]]:
    """Return for each output the named dimensions of its axes, found by runs with half of each. Raises WeightsError."""
    skip = 1 if batched else 0
    found = [[""] * (output.ndim - skip) for output in outputs]
    longest = {name: size for spec in inputs for name, size in zip(spec.named, spec.shape, strict=True) if name}
    count = len(outputs[0]) if batched else 1
    given = _first(arrays, count)
    for dimension, most in longest.items():
        length = max(trial.least[dimension], most // 2)
        if length >= most:
            continue
        short, padded = {}, {}
        for spec in inputs:
            cut = (slice(None), *(slice(length if name == dimension else None) for name in spec.named))
            # ONNX Runtime, too, requires contiguous arrays.
            short[spec.name] = np.ascontiguousarray(given[spec.name][cut])
            padded[spec.name] = np.zeros_like(given[spec.name])
            padded[spec.name][cut] = short[spec.name]
        for number, (whole, part) in enumerate(zip(trial.run(padded, batched), trial.run(short, batched), strict=True)):
            for axis in range(skip, whole.ndim):
                if whole.shape[axis] != part.shape[axis]:
                    if (whole.shape[axis], part.shape[axis]) != (most, length):
                        raise WeightsError(
                            f"{trial.name} does not follow {dimension}: state one length of it in {trial.beside}."
                        )
                    found[number][axis - skip] = dimension
            cut = tuple(slice(size) for size in part.shape)
            if not _close(part, whole[cut]):
                raise WeightsError(
                    f"{trial.name} cannot be filled up in {dimension}: state one length of it in {trial.beside}."
                )
    return [tuple(names) if any(names) else () for names in found]


def _close(one: Tensor, other: Tensor) -> bool:
    if not one.is_floating_point():
        return torch.equal(one, other)
    scale = float(one.double().abs().nan_to_num(posinf=0, neginf=0).max()) if one.numel() else 0.0
    return torch.allclose(one.double(), other.double(), rtol=0, atol=_AGREEMENT * scale + 1e-12, equal_nan=True)
