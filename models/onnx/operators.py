"""ONNX's operators in PyTorch that compute with or move numbers, and the register of all.

Owns: one function an operator, opset 9 to 28, of those in exports of image networks; models.onnx.layers has the
others. Must not know graphs or files.
Values are of two kinds: tensors, and numbers of the host (an int or a list of ints), which come from shapes. These stay
Python's, so that a tracer sees them as shapes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

Host = int | list[Any]
"""A number or a list of numbers of the host: a scalar or a vector of int64 that is made of shapes or constants."""

Operator = Callable[[Sequence[Any], Mapping[str, Any]], Any]

OPERATORS: dict[str, Operator] = {}

_TYPES = {
    **dict.fromkeys((1, 10, 16), torch.float32),  # float16 and bfloat16, too: the engine chooses the precision.
    2: torch.uint8,
    3: torch.int8,
    5: torch.int16,
    6: torch.int32,
    7: torch.int64,
    9: torch.bool,
    11: torch.float64,
}


class UnsupportedError(ValueError):
    """Form of an operator that is not computed here; the message names it."""


def operator(name: str) -> Callable[[Operator], Operator]:
    """Register a function for an operator."""

    def register(function: Operator) -> Operator:
        OPERATORS[name] = function
        return function

    return register


def is_host(value: Any) -> bool:
    """Return True if a value is numbers of the host."""
    return not isinstance(value, Tensor) and value is not None


def as_tensor(value: Any, like: Tensor | None = None) -> Tensor:
    """Convert a value to a tensor; numbers of the host become int64."""
    if isinstance(value, Tensor):
        return value
    return torch.tensor(value, dtype=torch.int64, device=None if like is None else like.device)


def as_numbers(value: Any) -> list[Any]:
    """Convert a value, constant or made of shapes, to a list of numbers. Raises UnsupportedError."""
    if isinstance(value, Tensor):
        numbers: list[Any] = value.reshape(-1).tolist()
        return numbers
    return list(value) if isinstance(value, list) else [value]


def _tensors_of(values: Sequence[Any]) -> list[Tensor]:
    like = next((value for value in values if isinstance(value, Tensor)), None)
    return [as_tensor(value, like) for value in values]


def input_at(inputs: Sequence[Any], index: int) -> Any:
    """Return an input, None if it is omitted."""
    return inputs[index] if index < len(inputs) else None


def numbers_at(inputs: Sequence[Any], index: int, missing: Any) -> Any:
    """Return the numbers of an input; if it is omitted, `missing`: often an attribute, which it was in older opsets."""
    value = input_at(inputs, index)
    return missing if value is None else as_numbers(value)


# Arithmetic


def _elementwise(on_tensors: Callable[..., Any], on_numbers: Callable[..., Any]) -> Operator:
    def compute(inputs: Sequence[Any], attributes: Mapping[str, Any]) -> Any:
        if all(is_host(value) for value in inputs):
            if not any(isinstance(value, list) for value in inputs):
                return on_numbers(*inputs)
            length = max(len(value) for value in inputs if isinstance(value, list))
            lists = [value if isinstance(value, list) else [value] for value in inputs]
            lists = [value * length if len(value) == 1 else value for value in lists]
            return [on_numbers(*numbers) for numbers in zip(*lists, strict=True)]
        return on_tensors(*_tensors_of(inputs))

    return compute


def _divided(one: Tensor, other: Tensor) -> Tensor:
    if one.is_floating_point() or other.is_floating_point():
        return one / other
    return torch.div(one, other, rounding_mode="trunc")


def _quotient(one: Any, other: Any) -> Any:
    """Divide whole numbers of shapes towards zero, as ONNX does. A tracer's numbers can be tensors."""
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return _divided(*_tensors_of((one, other)))
    return one // other if (one < 0) == (other < 0) else -(-one // other)


def _power(base: Tensor, exponent: Tensor) -> Tensor:
    if base.is_floating_point():
        return torch.pow(base, exponent.to(base.dtype))
    return torch.pow(base, exponent).to(base.dtype)


for _name, _on_tensors, _on_numbers in (
    ("Add", torch.add, lambda a, b: a + b),
    ("Sub", torch.sub, lambda a, b: a - b),
    ("Mul", torch.mul, lambda a, b: a * b),
    ("Div", _divided, _quotient),
    ("Mod", torch.remainder, lambda a, b: a % b),
    ("Pow", _power, lambda a, b: a**b),
    ("Equal", torch.eq, lambda a, b: a == b),
    ("Greater", torch.gt, lambda a, b: a > b),
    ("GreaterOrEqual", torch.ge, lambda a, b: a >= b),
    ("Less", torch.lt, lambda a, b: a < b),
    ("LessOrEqual", torch.le, lambda a, b: a <= b),
    ("And", torch.logical_and, lambda a, b: a and b),
    ("Or", torch.logical_or, lambda a, b: a or b),
    ("Xor", torch.logical_xor, lambda a, b: bool(a) != bool(b)),
    ("Neg", torch.neg, lambda a: -a),
    ("Not", torch.logical_not, lambda a: not a),
):
    OPERATORS[_name] = _elementwise(_on_tensors, _on_numbers)

_OF_TORCH = (
    *("Abs", "Atan", "Ceil", "Cos", "Erf", "Exp", "Floor", "IsNaN", "Log", "Reciprocal", "Relu", "Round", "Sigmoid"),
    *("Sign", "Sin", "Sqrt", "Tanh"),
)
for _name, _function in (
    *((name, getattr(torch, name.lower())) for name in _OF_TORCH),
    *(("Softplus", functional.softplus), ("HardSwish", functional.hardswish), ("Mish", functional.mish)),
):
    OPERATORS[_name] = lambda inputs, attributes, function=_function: function(as_tensor(inputs[0]))  # type: ignore[misc]


OPERATORS |= {
    **dict.fromkeys(("Identity", "Dropout"), lambda inputs, attributes: inputs[0]),
    "LeakyRelu": lambda inputs, attributes: functional.leaky_relu(inputs[0], attributes.get("alpha", 0.01)),
    "Elu": lambda inputs, attributes: functional.elu(inputs[0], attributes.get("alpha", 1.0)),
    "PRelu": lambda inputs, attributes: torch.where(inputs[0] >= 0, inputs[0], inputs[0] * inputs[1]),
    "HardSigmoid": lambda inputs, attributes: torch.clamp(
        inputs[0] * attributes.get("alpha", 0.2) + attributes.get("beta", 0.5), 0, 1
    ),
    "Gelu": lambda inputs, attributes: functional.gelu(inputs[0], approximate=attributes.get("approximate", "none")),
    "Softmax": lambda inputs, attributes: _over_axis(torch.softmax, inputs[0], attributes),
    "LogSoftmax": lambda inputs, attributes: _over_axis(torch.log_softmax, inputs[0], attributes),
    "ArgMax": lambda inputs, attributes: inputs[0].argmax(
        attributes.get("axis", 0), keepdim=bool(attributes.get("keepdims", 1))
    ),
    "CumSum": lambda inputs, attributes: as_tensor(inputs[0]).cumsum(as_numbers(inputs[1])[0]),
    "Trilu": lambda inputs, attributes: (torch.triu if attributes.get("upper", 1) else torch.tril)(
        as_tensor(inputs[0]), numbers_at(inputs, 1, [0])[0]
    ),
    "NonZero": lambda inputs, attributes: as_tensor(inputs[0]).nonzero().t(),
    "Min": _elementwise(lambda *tensors: functools.reduce(torch.minimum, tensors), min),
    "Max": _elementwise(lambda *tensors: functools.reduce(torch.maximum, tensors), max),
    "Sum": _elementwise(lambda *tensors: functools.reduce(torch.add, tensors), lambda *numbers: sum(numbers)),
    "Where": _elementwise(
        lambda condition, one, other: torch.where(condition.to(torch.bool), one, other),
        lambda condition, one, other: one if condition else other,
    ),
}


def _over_axis(function: Callable[..., Tensor], tensor: Tensor, attributes: Mapping[str, Any]) -> Tensor:
    """Apply a function along an axis; before opset 13 over all axes from it on (`flattened`, by models.onnx.forms)."""
    axis = attributes.get("axis", -1)
    if not attributes.get("flattened", 0) or axis in (-1, tensor.ndim - 1):
        return function(tensor, axis)
    return function(tensor.flatten(axis % tensor.ndim), -1).reshape(tensor.shape)


@operator("Swish")
def _swish(inputs: Sequence[Any], attributes: Mapping[str, Any]) -> Any:
    alpha = attributes.get("alpha", 1.0)
    return functional.silu(inputs[0]) if alpha == 1 else inputs[0] * torch.sigmoid(alpha * inputs[0])


@operator("Clip")
def _clip(inputs: Sequence[Any], attributes: Mapping[str, Any]) -> Any:
    low = numbers_at(inputs, 1, [attributes.get("min")])[0]
    high = numbers_at(inputs, 2, [attributes.get("max")])[0]
    return torch.clamp(as_tensor(inputs[0]), low, high)


@operator("Cast")
def _cast(inputs: Sequence[Any], attributes: Mapping[str, Any]) -> Any:
    dtype = _TYPES.get(attributes["to"])
    if dtype is None:
        raise UnsupportedError(f"Cast to type {attributes['to']}")
    if is_host(inputs[0]) and dtype in (torch.int64, torch.int32):
        return inputs[0]
    tensor = as_tensor(inputs[0])
    # A half or float of the file has the precision in which the network runs.
    return tensor if dtype is torch.float32 and tensor.is_floating_point() else tensor.to(dtype)


# Reductions


def _reduction(on_tensors: Callable[..., Any]) -> Operator:
    def compute(inputs: Sequence[Any], attributes: Mapping[str, Any]) -> Any:
        tensor, axes = as_tensor(inputs[0]), numbers_at(inputs, 1, attributes.get("axes"))
        if not axes and attributes.get("noop_with_empty_axes", 0):
            return on_tensors(tensor.unsqueeze(0), [0], False)  # ReduceL2 still applies to each number.
        return on_tensors(tensor, axes or list(range(tensor.ndim)), bool(attributes.get("keepdims", 1)))

    return compute


def _of_nothing(tensor: Tensor, axes: list[int], keep: bool) -> Tensor:
    """Return the maximum of no numbers, minus infinity, which PyTorch refuses to compute."""
    if not tensor.is_floating_point():
        raise UnsupportedError("ReduceMax of no integers")
    return tensor.sum(axes, keepdim=keep) - math.inf


for _name, _reduce in (
    ("ReduceMean", lambda x, axes, keep: x.mean(axes, keepdim=keep)),
    ("ReduceSum", lambda x, axes, keep: x.sum(axes, keepdim=keep)),
    ("ReduceMax", lambda x, axes, keep: x.amax(axes, keepdim=keep) if x.numel() else _of_nothing(x, axes, keep)),
    ("ReduceMin", lambda x, axes, keep: x.amin(axes, keepdim=keep)),
    ("ReduceL2", lambda x, axes, keep: x.pow(2).sum(axes, keepdim=keep).sqrt()),
    ("ReduceL1", lambda x, axes, keep: x.abs().sum(axes, keepdim=keep)),
):
    OPERATORS[_name] = _reduction(_reduce)


@operator("ReduceProd")
def _reduce_prod(inputs: Sequence[Any], attributes: Mapping[str, Any]) -> Any:
    if is_host(inputs[0]) and not attributes.get("noop_with_empty_axes", 0):
        product = math.prod(as_numbers(inputs[0]))
        return [product] if attributes.get("keepdims", 1) else product
    return _reduction(_product)(inputs, attributes)


def _product(tensor: Tensor, axes: Sequence[int], keep: bool) -> Tensor:
    for axis in sorted((axis % tensor.ndim for axis in axes), reverse=True):
        tensor = tensor.prod(axis, keepdim=keep)
    return tensor


@operator("TopK")
def _topk(inputs: Sequence[Any], attributes: Mapping[str, Any]) -> Any:
    count = numbers_at(inputs, 1, [attributes.get("k")])[0]
    axis, largest = attributes.get("axis", -1), bool(attributes.get("largest", 1))
    # Of equal numbers the one of the lowest index comes first, which torch.topk does not promise.
    found = inputs[0].sort(dim=axis, descending=largest, stable=True)
    return tuple(each.narrow(axis, 0, count) for each in found)


OPERATORS |= {
    "Range": lambda inputs, attributes: torch.arange(*(as_numbers(value)[0] for value in inputs)),
    "Size": lambda inputs, attributes: math.prod(inputs[0].shape),
    "Tile": lambda inputs, attributes: as_tensor(inputs[0]).repeat(as_numbers(inputs[1])),
}


@operator("Transpose")
def _transpose(inputs: Sequence[Any], attributes: Mapping[str, Any]) -> Any:
    tensor = as_tensor(inputs[0])
    return tensor.permute(attributes.get("perm") or tuple(reversed(range(tensor.ndim))))


@operator("Shape")
def _shape(inputs: Sequence[Any], attributes: Mapping[str, Any]) -> Any:
    shape = [len(inputs[0])] if isinstance(inputs[0], list) else list(inputs[0].shape)
    return shape[attributes.get("start", 0) : attributes.get("end", len(shape))]


@operator("Reshape")
def _reshape(inputs: Sequence[Any], attributes: Mapping[str, Any]) -> Any:
    wanted = as_numbers(inputs[1])
    if is_host(inputs[0]):
        numbers = as_numbers(inputs[0])
        if wanted in ([-1], [len(numbers)]):
            return numbers
        return as_tensor(inputs[0]).reshape(wanted)
    if not attributes.get("allowzero", 0):
        wanted = [
            inputs[0].shape[axis] if isinstance(length, int) and length == 0 else length
            for axis, length in enumerate(wanted)
        ]
    return inputs[0].reshape(wanted)


@operator("Flatten")
def _flatten(inputs: Sequence[Any], attributes: Mapping[str, Any]) -> Any:
    axis = attributes.get("axis", 1)
    axis = axis + inputs[0].ndim if axis < 0 else axis
    if axis == 1:
        return inputs[0].flatten(1)
    return inputs[0].reshape(math.prod(inputs[0].shape[:axis]), -1)


@operator("Unsqueeze")
def _unsqueeze(inputs: Sequence[Any], attributes: Mapping[str, Any]) -> Any:
    axes = numbers_at(inputs, 1, attributes.get("axes")) or []
    if is_host(inputs[0]) and not isinstance(inputs[0], list) and axes in ([0], [-1]):
        return [inputs[0]]
    tensor = as_tensor(inputs[0])
    rank = tensor.ndim + len(axes)
    for axis in sorted(axis % rank for axis in axes):
        tensor = tensor.unsqueeze(axis)
    return tensor


@operator("Squeeze")
def _squeeze(inputs: Sequence[Any], attributes: Mapping[str, Any]) -> Any:
    axes = numbers_at(inputs, 1, attributes.get("axes"))
    if is_host(inputs[0]):
        numbers = as_numbers(inputs[0])
        if len(numbers) != 1:
            raise UnsupportedError("Squeeze of a list of several numbers")
        return numbers[0]
    tensor = inputs[0]
    if axes is None:
        axes = [axis for axis, length in enumerate(tensor.shape) if length == 1]
    for axis in sorted((axis % tensor.ndim for axis in axes), reverse=True):
        tensor = tensor.squeeze(axis)
    return tensor


@operator("Concat")
def _concat(inputs: Sequence[Any], attributes: Mapping[str, Any]) -> Any:
    if all(is_host(value) for value in inputs):
        return [number for value in inputs for number in as_numbers(value)]
    return torch.cat(_tensors_of(inputs), attributes["axis"])


@operator("Split")
def _split(inputs: Sequence[Any], attributes: Mapping[str, Any]) -> Any:
    axis = attributes.get("axis", 0)
    sizes = numbers_at(inputs, 1, attributes.get("split"))
    if is_host(inputs[0]):
        numbers, parts = as_numbers(inputs[0]), []
        for size in sizes or [1] * attributes["outputs"]:
            parts.append(numbers[:size])
            numbers = numbers[size:]
        return tuple(parts)
    if sizes is None:
        count = attributes["outputs"]
        length = inputs[0].shape[axis]
        share = -(-length // count)
        sizes = [share] * (count - 1) + [length - share * (count - 1)]
    return torch.split(inputs[0], sizes, axis)


@operator("Slice")
def _slice(inputs: Sequence[Any], attributes: Mapping[str, Any]) -> Any:
    starts = numbers_at(inputs, 1, attributes.get("starts", []))
    ends = numbers_at(inputs, 2, attributes.get("ends", []))
    axes = numbers_at(inputs, 3, attributes.get("axes", range(len(starts))))
    steps = numbers_at(inputs, 4, [1] * len(starts))
    if is_host(inputs[0]):
        return as_numbers(inputs[0])[slice(starts[0], None if ends[0] >= 2**31 - 1 else ends[0], steps[0])]
    tensor = as_tensor(inputs[0])
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        tensor = _sliced(tensor, axis % tensor.ndim, start, end, step)
    return tensor


def _sliced(tensor: Tensor, axis: int, start: Any, end: Any, step: Any) -> Tensor:
    if step < 0:
        length = tensor.shape[axis]
        first = min(start + length if start < 0 else start, length - 1)
        last = max(end + length if end < 0 else end, -1) if end > -length - 1 else -1
        return tensor.index_select(axis, torch.arange(first, last, step, device=tensor.device))
    where = [slice(None)] * tensor.ndim
    where[axis] = slice(start, None if end >= 2**31 - 1 else end, step)
    return tensor[tuple(where)]


@operator("Gather")
def _gather(inputs: Sequence[Any], attributes: Mapping[str, Any]) -> Any:
    axis, (source, index) = attributes.get("axis", 0), inputs
    if is_host(source):
        numbers = as_numbers(source)
        if isinstance(index, Tensor) and index.ndim == 0:
            return numbers[int(index)]
        return [numbers[place] for place in as_numbers(index)] if not isinstance(index, int) else numbers[index]
    axis %= source.ndim
    if isinstance(index, int):
        return source.select(axis, index)
    picked = as_tensor(index, source)
    picked = torch.where(picked < 0, picked + source.shape[axis], picked)
    if picked.ndim == 0:
        return source.index_select(axis, picked.reshape(1)).squeeze(axis)
    flat = source.index_select(axis, picked.reshape(-1))
    return flat.reshape(*source.shape[:axis], *picked.shape, *source.shape[axis + 1 :])


@operator("ScatterElements")
@operator("GatherElements")
def _elements(inputs: Sequence[Any], attributes: Mapping[str, Any]) -> Any:
    source, index, *updates = _tensors_of(inputs)
    axis = attributes.get("axis", 0) % source.ndim
    index = torch.where(index < 0, index + source.shape[axis], index)
    return source.scatter(axis, index, updates[0].to(source.dtype)) if updates else source.gather(axis, index)


@operator("ScatterND")
@operator("GatherND")
def _at_places(inputs: Sequence[Any], attributes: Mapping[str, Any]) -> Any:
    source, index, *updates = _tensors_of(inputs)
    places = tuple(index.unbind(-1))
    return source.index_put(places, updates[0].to(source.dtype)) if updates else source[places]


@operator("Expand")
def _expand(inputs: Sequence[Any], attributes: Mapping[str, Any]) -> Any:
    wanted = as_numbers(inputs[1])
    if is_host(inputs[0]) and len(wanted) == 1 and len(as_numbers(inputs[0])) == 1:
        return as_numbers(inputs[0]) * wanted[0]
    tensor = as_tensor(inputs[0])
    lengths = [1] * (len(wanted) - tensor.ndim) + list(tensor.shape)
    wanted = [1] * (len(lengths) - len(wanted)) + wanted
    shape = [have if isinstance(want, int) and want == 1 else want for have, want in zip(lengths, wanted, strict=True)]
    return tensor.expand(shape)


@operator("ConstantOfShape")
def _constant_of_shape(inputs: Sequence[Any], attributes: Mapping[str, Any]) -> Any:
    value, shape = attributes.get("value"), as_numbers(inputs[0])
    if is_host(value) and len(shape) == 1 and isinstance(shape[0], int):
        return as_numbers(value)[:1] * shape[0]
    return torch.zeros(shape) if value is None else as_tensor(value).reshape(-1)[0].expand(shape)


_PADS = {"reflect": "reflect", "edge": "replicate", "wrap": "circular"}


@operator("Pad")
def _pad(inputs: Sequence[Any], attributes: Mapping[str, Any]) -> Any:
    pads = numbers_at(inputs, 1, attributes.get("pads", []))
    if attributes.get("pairs", 0):
        pads = [*pads[-2::-2], *pads[::-2]]
    value = numbers_at(inputs, 2, [attributes.get("value", 0.0)])[0]
    tensor, mode = inputs[0], attributes.get("mode", "constant")
    axes = numbers_at(inputs, 3, None) or list(range(tensor.ndim))
    half = len(pads) // 2
    both = {axis % tensor.ndim: (pads[number], pads[number + half]) for number, axis in enumerate(axes)}
    amounts = [amount for axis in reversed(range(tensor.ndim)) for amount in both.get(axis, (0, 0))]
    least = 2 * min(half, 2) if mode == "constant" else 0
    while len(amounts) > least and amounts[-1] == amounts[-2] == 0:
        amounts = amounts[:-2]
    if mode == "constant":
        return functional.pad(tensor, amounts, value=value)
    return functional.pad(tensor, amounts, mode=_PADS[mode])
