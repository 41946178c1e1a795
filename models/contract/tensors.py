"""Networks that take tensors and answer with tensors: their declarations, and the layout of an item in memory.

    {name: array [n, …]} ─► TensorModel.asked ─► pack, item by item ─► uint8 [item_bytes]: a slot, a row of the batch
    uint8 [n, item_bytes] ─► views, one tensor an input ─► network ─► reduce ─► collect ─► {name: array [n, …]}

Must not know files (models.exports.exported), HTTP or devices. All inputs of an item are one piece of bytes, so that
queue, shared memory, copies to the device and batches are the same for every network. Only the network itself and the
engines with runtimes of their own look into it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, ClassVar, Literal

import numpy as np

from models.contract.measures import TENSOR_LIMITS, of_tensors
from models.contract.model import Array, Finds, Model

# Names of the Open Inference Protocol. Not BYTES: strings are no tensors of a device; nor BF16: NumPy has no such type.
DATATYPES: dict[str, np.dtype[Any]] = {
    "BOOL": np.dtype(np.bool_),
    **{f"UINT{bits}": np.dtype(f"u{bits // 8}") for bits in (8, 16, 32, 64)},
    **{f"INT{bits}": np.dtype(f"i{bits // 8}") for bits in (8, 16, 32, 64)},
    **{f"FP{bits}": np.dtype(f"f{bits // 8}") for bits in (16, 32, 64)},
}
_ALIGNMENT_BYTES = 64  # Alignment of every input in an item, best for vector units and runtimes.


Form = Literal["onnx", "program", "script", "openvino"]
"""Form of a network of tensors (backends.Form)."""


class InputError(ValueError):
    """Input of a client that does not fit the model; the message is one plain sentence."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """An input or output of one item, without the batch dimension.

    `shape`: lengths of the axes, the greatest allowed if `dimensions` names the axis. Such an axis may be shorter (in
    every input that has it alike), is filled up with zeros, and cut back in outputs that have it. `limits`: least and
    greatest value (of whole numbers), both allowed, None if nothing is stated.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    dimensions: tuple[str, ...] = ()
    limits: tuple[int, int] | None = None

    @property
    def dtype(self) -> np.dtype[Any]:
        """NumPy's type of `datatype`."""
        return DATATYPES[self.datatype]

    @property
    def item_bytes(self) -> int:
        """Bytes of one item's tensor."""
        return prod(self.shape) * self.dtype.itemsize

    @property
    def named(self) -> tuple[str, ...]:
        """Name of every axis: "" if the length is fixed."""
        return self.dimensions or ("",) * len(self.shape)

    def wire_shape(self, batched: bool) -> tuple[int, ...]:
        """Return the shape for metadata: -1 for an axis that a request chooses, the batch first."""
        lengths = tuple(-1 if name else length for length, name in zip(self.shape, self.named, strict=True))
        return (-1, *lengths) if batched else lengths


@dataclass(frozen=True, slots=True)
class TensorOptions:
    """Options of a request to a `TensorModel`.

    `outputs`: their numbers, in the order of the answer. `lengths`: of named dimensions, in this request.
    """

    outputs: tuple[int, ...]
    lengths: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class TensorModel(Model):
    """A network of tensors. One item is uint8 [item_bytes]: its inputs one after the other, each aligned.

    `inputs`, `results`: in the network's order. `batched`: whether the first axis of every tensor is the batch, so that
    items of several requests run together; else a request is one item. `batch_range`: the sizes the network takes.
    """

    may_be_infinite: ClassVar[bool] = True  # Networks may mask with -inf.
    task = "infer"
    finds: ClassVar[Finds] = "tensors"
    limits = TENSOR_LIMITS

    inputs: tuple[TensorSpec, ...]
    results: tuple[TensorSpec, ...]
    batched: bool
    batch_range: tuple[int, int]

    @property
    def outputs(self) -> tuple[str, ...]:  # noqa: D102
        return tuple(spec.name for spec in self.results)

    @property
    @abstractmethod
    def form(self) -> Form:
        """Form of the network."""

    @property
    @abstractmethod
    def platform(self) -> str:
        """Kind of network in the Open Inference Protocol's words, e.g. `onnx_onnxv1`."""

    @abstractmethod
    def probes(self) -> Array:
        """Return items to compare engines on, uint8 [n, item_bytes]: the same at every call."""

    @cached_property
    def layout(self) -> tuple[tuple[int, int], ...]:
        """First byte and end of each input in an item."""
        return layout(self.inputs)

    def batch_sizes(self, ladder: Sequence[int]) -> tuple[int, ...]:
        """Return (1,) without a batch dimension, else the ladder's sizes that the network takes, or its least size."""
        if not self.batched:
            return (1,)
        low, high = self.batch_range
        return tuple(size for size in ladder if low <= size <= high) or (low,)

    def asked(self, inputs: Mapping[str, Array], outputs: Sequence[str] = ()) -> tuple[int, TensorOptions]:
        """Count the items in arrays ([n, …] each, in the declared types), and resolve the wanted outputs.

        `outputs`: names; none means all. Raises InputError.
        """
        for name in inputs.keys() - {spec.name for spec in self.inputs}:
            known = ", ".join(spec.name for spec in self.inputs)
            raise InputError(f"{self.name} has no input {name!r}; it takes {known}")
        names = self.outputs
        for name in outputs:
            if name not in names:
                raise InputError(f"{self.name} has no output {name!r}; it has {', '.join(names)}")
        counts: dict[str, int] = {}
        lengths: dict[str, int] = {}
        for spec in self.inputs:
            array = inputs.get(spec.name)
            if array is None:
                raise InputError(f"the input {spec.name!r} is missing")
            counts[spec.name] = self._checked(spec, array, lengths)
        if len(set(counts.values())) > 1:
            raise InputError(f"the inputs are of different batch sizes: {counts}")
        wanted = tuple(names.index(name) for name in outputs) or tuple(range(len(names)))
        return next(iter(counts.values())), TensorOptions(wanted, tuple(lengths.items()))

    def _checked(self, spec: TensorSpec, array: Array, lengths: dict[str, int]) -> int:
        """Return the number of items of one input; compare and add `lengths` of named dimensions. Raises InputError."""
        if array.dtype != spec.dtype:
            raise InputError(f"the input {spec.name!r} must be {spec.datatype}, not {datatype_of(array)}")
        item = array.shape[1:] if self.batched else array.shape
        named = zip(spec.shape, spec.named, strict=True)
        sides = [f"{name} <= {length}" if name else str(length) for length, name in named]
        wanted = f"[{', '.join((['n'] if self.batched else []) + sides)}]"
        if len(item) != len(spec.shape) or (self.batched and not array.ndim):
            raise InputError(f"the input {spec.name!r} must have the shape {wanted}, not {list(array.shape)}")
        for length, longest, name in zip(item, spec.shape, spec.named, strict=True):
            if not (1 <= length <= longest if name else length == longest):
                raise InputError(f"the input {spec.name!r} must have the shape {wanted}, not {list(array.shape)}")
            if name and lengths.setdefault(name, length) != length:
                raise InputError(f"{name} is {length} in the input {spec.name!r} and {lengths[name]} in another")
        count = len(array) if self.batched else 1
        if not count:
            raise InputError(f"the input {spec.name!r} is of no items: a batch has at least one")
        if spec.limits is not None and array.size:
            low, high = spec.limits
            least, greatest = int(array.min()), int(array.max())
            if least < low or greatest > high:
                raise InputError(
                    f"the input {spec.name!r} holds {least if least < low else greatest}; "
                    f"from {low} to {high} is what the network takes"
                )
        return count

    def pack(self, inputs: Mapping[str, Array], index: int, out: Array) -> None:
        """Write item `index` of inputs that `asked` has accepted into `out`, uint8 [item_bytes]."""
        for spec, (start, stop) in zip(self.inputs, self.layout, strict=True):
            array = inputs[spec.name]
            item = array[index] if self.batched else array
            target = out[start:stop].view(spec.dtype).reshape(spec.shape)
            if item.shape != spec.shape:
                target[...] = 0
                target = target[tuple(slice(length) for length in item.shape)]
            # A client may send bytes other than 0 and 1, which are no truth values.
            target[...] = item.view(np.uint8) != 0 if spec.datatype == "BOOL" else item

    def reduce(self, outputs: Sequence[Array], index: int, options: TensorOptions) -> tuple[Array, ...]:
        """Return the wanted outputs of one item, cut to the lengths of its request."""
        lengths = dict(options.lengths)
        reduced = []
        for number in options.outputs:
            row, spec = outputs[number][index], self.results[number]
            cut = tuple(slice(lengths.get(name) if name else None) for name in spec.named)
            reduced.append(np.array(row[cut], dtype=spec.dtype, order="C"))
        return tuple(reduced)

    def measures(self, expected: Sequence[Array], outputs: Sequence[Array]) -> dict[str, float]:  # noqa: D102
        return of_tensors(expected, outputs)

    def collect(self, results: Sequence[Sequence[Array]], options: TensorOptions) -> dict[str, Array]:
        """Join the results of `reduce` for each item of a request into the answer's arrays, in the order asked for."""
        collected = {}
        for position, number in enumerate(options.outputs):
            rows = [result[position] for result in results]
            collected[self.results[number].name] = np.stack(rows) if self.batched else rows[0]
        return collected


def layout(inputs: Sequence[TensorSpec]) -> tuple[tuple[int, int], ...]:
    """Return the first byte and the end of each input in an item."""
    places, end = [], 0
    for spec in inputs:
        places.append((end, end + spec.item_bytes))
        end = -(-places[-1][1] // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    return tuple(places)


def item_bytes(inputs: Sequence[TensorSpec]) -> int:
    """Return the bytes of one item with all its inputs; items in a row keep the alignment."""
    return -(-layout(inputs)[-1][1] // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def random_arrays(inputs: Sequence[TensorSpec], count: int) -> dict[str, Array]:
    """Draw arrays [count, …] that networks of these inputs take: normal floats, whole numbers within their limits.

    Without limits UINT8 is any byte, as in images, and other whole numbers are 0 or 1: right for masks, and an index
    into anything with two entries.
    """
    generator = np.random.default_rng(0)
    arrays: dict[str, Array] = {}
    for spec in inputs:
        shape = (count, *spec.shape)
        if spec.dtype.kind == "f":
            arrays[spec.name] = generator.standard_normal(shape).astype(spec.dtype)
        else:
            low, high = spec.limits or (0, 255 if spec.datatype == "UINT8" else 1)
            numbers = generator.integers(low, high, shape, dtype=np.int64, endpoint=True)
            if spec.limits in (None, (0, 1)):
                numbers[..., 0] = 1  # A mask that hides everything leaves a network nothing to answer.
            arrays[spec.name] = numbers.astype(spec.dtype)
    return arrays


def datatype_of(array: Array) -> str:
    """Return the protocol's name of an array's type; NumPy's if the protocol has none."""
    return next((name for name, dtype in DATATYPES.items() if dtype == array.dtype), str(array.dtype))
