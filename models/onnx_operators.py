"""What ONNX's operators compute, in PyTorch.

Owns: one function an operator, opset 9 to 22, of those that networks of images are exported with. Must not know graphs
or files. Two kinds of values go in and out: tensors, and numbers of the host (an int or a list of ints), which are what
becomes of shapes: these stay Python's, so that whoever traces the network sees them as shapes.
"""

from __future__ import annotations

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
    1: torch.float32,
    2: torch.uint8,
    3: torch.int8,
    5: torch.int16,
    6: torch.int32,
    7: torch.int64,
    9: torch.bool,
    10: torch.float32,  # A half in the file: precision is chosen by the engine, not by the file.
    11: torch.float64,
    16: torch.float32,
}


class UnsupportedError(ValueError):
    """The operator has a form that is not computed here; the message says which."""


def _operator(*names: str) -> Callable[[Operator], Operator]:
    def register(function: Operator) -> Operator:
        for name in names:
            OPERATORS[name] = function
        return function

    return register


def is_host(value: Any) -> bool:
    """Whether a value is numbers of the host."""
    return not isinstance(value, Tensor) and value is not None


def as_tensor(value: Any, like: Tensor | None = None) -> Tensor:
    """A tensor of a value; numbers of the host become int64."""
    if isinstance(value, Tensor):
        return value
    return torch.tensor(value, dtype=torch.int64, device=None if like is None else like.device)


def as_numbers(value: Any) -> list[Any]:
    """A list of numbers from a value that must be one, constant or made of shapes. Raises UnsupportedError."""
    if isinstance(value, Tensor):
        numbers: list[Any] = value.reshape(-1).tolist()
        return numbers
    return list(value) if isinstance(value, list) else [value]


def _tensors(values: Sequence[Any]) -> list[Tensor]:
    like = next((value for value in values if isinstance(value, Tensor)), None)
    return [as_tensor(value, like) for value in values]


def _at(inputs: Sequence[Any], index: int) -> Any:
    return inputs[index] if index < len(inputs) else None


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
        return on_tensors(*_tensors(inputs))

    return compute


def _divided(one: Tensor, other: Tensor) -> Tensor:
    if one.is_floating_point() or other.is_floating_point():
        return one / other
    return torch.div(one, other, rounding_mode="trunc")


def _power(base: Tensor, exponent: Tensor) -> Tensor:
    return torch.pow(base, exponent.to(base.dtype) if base.is_floating_point() else exponent)


for _name, _on_tensors, _on_numbers in (
    ("Add", torch.add, lambda a, b: a + b),
    ("Sub", torch.sub, lambda a, b: a - b),
    ("Mul", torch.mul, lambda a, b: a * b),
    ("Div", _divided, lambda a, b: a // b),
    ("Mod", torch.remainder, lambda a, b: a % b),
    ("Pow", _power, lambda a, b: a**b),
    ("Equal", torch.eq, lambda a, b: a == b),
    ("Greater", torch.gt, lambda a, b: a > b),
    ("GreaterOrEqual", torch.ge, lambda a, b: a >= b),
    ("Less", torch.lt, lambda a, b: a < b),
    ("LessOrEqual", torch.le, lambda a, b: a <= b),
    ("And", torch.logical_and, lambda a, b: a and b),
    ("Or", torch.logical_or, lambda a, b: a or b),
    ("Neg", torch.neg, lambda a: -a),
    ("Not", torch.logical_not, lambda a: not a),
):
    OPERATORS[_name] = _elementwise(_on_tensors, _on_numbers)

for _name, _function in (
    ("Sigmoid", torch.sigmoid),
    ("Tanh", torch.tanh),
    ("Relu", torch.relu),
    ("Exp", torch.exp),
    ("Log", torch.log),
    ("Sqrt", torch.sqrt),
    ("Abs", torch.abs),
    ("Erf", torch.erf),
    ("Floor", torch.floor),
    ("Ceil", torch.ceil),
    ("Round", torch.round),
    ("Reciprocal", torch.reciprocal),
    ("Sin", torch.sin),
    ("Cos", torch.cos),
    ("Atan", torch.atan),
    ("Softplus", functional.softplus),
    ("Softsign", functional.softsign),
    ("HardSwish", functional.hardswish),
    ("Mish", functional.mish),
    ("Sign", torch.sign),
):
    OPERATORS[_name] = lambda inputs, attributes, function=_function: function(as_tensor(inputs[0]))  # type: ignore[misc]


@_operator("Identity", "Dropout")
def _identity(inputs: Sequence[Any], attributes: Mapping[str, Any]) -> Any:
    return inputs[0]


@_operator("Clip")
def _clip(inputs: Sequence[Any], attributes: Mapping[str, Any]) -> Any:
    low = attributes.get("min") if _at(inputs, 1) is None else as_numbers(inputs[1])[0]
    high = attributes.get("max") if _at(inputs, 2) is None else as_numbers(inputs[2])[0]
    return torch.clamp(as_tensor(inputs[0]), low, high)


@_operator("LeakyRelu")
def _leaky(inputs: Sequence[Any], attributes: Mapping[str, Any]) -> Any:
    return functional.leaky_relu(inputs[0], attributes.get("alpha", 0.01))


@_operator("Elu")
def _elu(inputs: Sequence[Any], attributes: Mapping[str, Any]) -> Any:
    return functional.elu(inputs[0], attributes.get("alpha", 1.0))


@_operator("PRelu")
def _prelu(inputs: Sequence[Any], attributes: Mapping[str, Any]) -> Any:
    return torch.where(inputs[0] >= 0, inputs[0], inputs[0] * inputs[1])


@_operator("HardSigmoid")
def _hard_sigmoid(inputs: Sequence[Any], attributes: Mapping[str, Any]) -> Any:
    return torch.clamp(inputs[0] * attributes.get("alpha", 0.2) + attributes.get("beta", 0.5), 0, 1)


@_operator("Gelu")
def _gelu(inputs: Sequence[Any], attributes: Mapping[str, Any]) -> Any:
    return functional.gelu(inputs[0], approximate=attributes.get("approximate", "none"))


@_operator("Min")
def _min(inputs: Sequence[Any], attributes: Mapping[str, Any]) -> Any:
    if all(is_host(value) for value in inputs):
        return _elementwise(torch.minimum, min)(inputs, attributes)
    first, *rest = _tensors(inputs)
    for other in rest:
        first = torch.minimum(first, other)
    return first


@_operator("Max")
def _max(inputs: Sequence[Any], attributes: Mapping[str, Any]) -> Any:
    if all(is_host(value) for value in inputs):
        return _elementwise(torch.maximum, max)(inputs, attributes)
    first, *rest = _tensors(inputs)
    for other in rest:
        first = torch.maximum(first, other)
    return first


@_operator("Sum")
def _sum(inputs: Sequence[Any], attributes: Mapping[str, Any]) -> Any:
    first, *rest = _tensors(inputs)
    for other in rest:
        first = first + other
    return first


@_operator("Where")
def _where(inputs: Sequence[Any], attributes: Mapping[str, Any]) -> Any:
    if all(is_host(value) for value in inputs):
        return _elementwise(torch.where, lambda condition, one, other: one if condition else other)(inputs, attributes)
    condition, one, other = _tensors(inputs)
    return torch.where(condition.to(torch.bool), one, other)


@_operator("Cast")
def _cast(inputs: Sequence[Any], attributes: Mapping[str, Any]) -> Any:
    dtype = _TYPES.get(attributes["to"])
    if dtype is None:
        raise UnsupportedError(f"Cast to type {attributes['to']}")
    if is_host(inputs[0]):
        if dtype in (torch.int64, torch.int32):
            return inputs[0]
        return as_tensor(inputs[0]).to(dtype)
    # A half or float of the file is whatever precision the network runs in.
    if dtype is torch.float32 and inputs[0].dtype in (torch.float16, torch.bfloat16):
        return inputs[0]
    return inputs[0].to(dtype)


# Shapes


@_operator("Shape")
def _shape(inputs: Sequence[Any], attributes: Mapping[str, Any]) -> Any:
    shape = [len(inputs[0])] if isinstance(inputs[0], list) else list(inputs[0].shape)
    return shape[attributes.get("start", 0) : attributes.get("end", len(shape))]


@_operator("Size")
def _size(inputs: Sequence[Any], attributes: Mapping[str, Any]) -> Any:
    return math.prod(inputs[0].shape)


@_operator("Reshape")
def _reshape(inputs: Sequence[Any], attributes: Mapping[str, Any]) -> Any:
    wanted = as_numbers(inputs[1])
    if is_host(inputs[0]):
        if wanted in ([-1], [len(as_numbers(inputs[0]))]):
            return as_numbers(inputs[0])
        return as_tensor(inputs[0]).reshape(wanted)
    if not attributes.get("allowzero", 0):
        wanted = [
            inputs[0].shape[axis] if isinstance(length, int) and length == 0 else length
            for axis, length in enumerate(wanted)
        ]
    return inputs[0].reshape(wanted)


@_operator("Flatten")
def _flatten(inputs: Sequence[Any], attributes: Mapping[str, Any]) -> Any:
    axis = attributes.get("axis", 1) % (inputs[0].ndim + 1)
    if axis == 1:
        return inputs[0].flatten(1)
    return inputs[0].reshape(math.prod(inputs[0].shape[:axis]), -1)


@_operator("Transpose")
def _transpose(inputs: Sequence[Any], attributes: Mapping[str, Any]) -> Any:
    return inputs[0].permute(attributes.get("perm") or tuple(reversed(range(inputs[0].ndim))))


def _axes(inputs: Sequence[Any], attributes: Mapping[str, Any], index: int = 1) -> list[int] | None:
    given = _at(inputs, index)
    if given is not None:
        return [int(axis) for axis in as_numbers(given)]
    return attributes.get("axes")


@_operator("Unsqueeze")
def _unsqueeze(inputs: Sequence[Any], attributes: Mapping[str, Any]) -> Any:
    axes = _axes(inputs, attributes) or []
    if is_host(inputs[0]) and not isinstance(inputs[0], list) and axes in ([0], [-1]):
        return [inputs[0]]
    tensor = as_tensor(inputs[0])
    rank = tensor.ndim + len(axes)
    for axis in sorted(axis % rank for axis in axes):
        tensor = tensor.unsqueeze(axis)
    return tensor


@_operator("Squeeze")
def _squeeze(inputs: Sequence[Any], attributes: Mapping[str, Any]) -> Any:
    axes = _axes(inputs, attributes)
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


@_operator("Concat")
def _concat(inputs: Sequence[Any], attributes: Mapping[str, Any]) -> Any:
    if all(is_host(value) for value in inputs):
        return [number for value in inputs for number in as_numbers(value)]
    return torch.cat(_tensors(inputs), attributes["axis"])


@_operator("Split")
def _split(inputs: Sequence[Any], attributes: Mapping[str, Any]) -> Any:
    axis = attributes.get("axis", 0)
    sizes = attributes.get("split") if _at(inputs, 1) is None else as_numbers(inputs[1])
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


@_operator("Slice")
def _slice(inputs: Sequence[Any], attributes: Mapping[str, Any]) -> Any:
    starts: list[Any] = attributes.get("starts", []) if _at(inputs, 1) is None else as_numbers(inputs[1])
    ends: list[Any] = attributes.get("ends", []) if _at(inputs, 2) is None else as_numbers(inputs[2])
    axes = _axes(inputs, attributes, 3)
    steps = [1] * len(starts) if _at(inputs, 4) is None else as_numbers(inputs[4])
    axes = list(range(len(starts))) if axes is None else axes
    if is_host(inputs[0]):
        return as_numbers(inputs[0])[slice(starts[0], None if ends[0] >= 2**31 - 1 else ends[0], steps[0])]
    tensor = inputs[0]
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


@_operator("Gather")
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


@_operator("GatherElements")
def _gather_elements(inputs: Sequence[Any], attributes: Mapping[str, Any]) -> Any:
    source, index = inputs
    axis = attributes.get("axis", 0) % source.ndim
    index = torch.where(index < 0, index + source.shape[axis], index)
    return torch.gather(source, axis, index)


@_operator("GatherND")
def _gather_nd(inputs: Sequence[Any], attributes: Mapping[str, Any]) -> Any:
    if attributes.get("batch_dims", 0):
        raise UnsupportedError("GatherND with batch_dims")
    source, index = _tensors(inputs)
    return source[tuple(index.unbind(-1))]


@_operator("ScatterND")
def _scatter_nd(inputs: Sequence[Any], attributes: Mapping[str, Any]) -> Any:
    if attributes.get("reduction", "none") != "none":
        raise UnsupportedError("ScatterND with a reduction")
    source, index, updates = _tensors(inputs)
    return source.index_put(tuple(index.unbind(-1)), updates.to(source.dtype))


@_operator("Expand")
def _expand(inputs: Sequence[Any], attributes: Mapping[str, Any]) -> Any:
    wanted = as_numbers(inputs[1])
    if is_host(inputs[0]) and len(wanted) == 1 and len(as_numbers(inputs[0])) == 1:
        return as_numbers(inputs[0]) * wanted[0]
    tensor = as_tensor(inputs[0])
    lengths = [1] * (len(wanted) - tensor.ndim) + list(tensor.shape)
    wanted = [1] * (len(lengths) - len(wanted)) + wanted
    shape = [have if isinstance(want, int) and want == 1 else want for have, want in zip(lengths, wanted, strict=True)]
    return tensor.expand(shape)


@_operator("Tile")
def _tile(inputs: Sequence[Any], attributes: Mapping[str, Any]) -> Any:
    return as_tensor(inputs[0]).repeat(as_numbers(inputs[1]))


@_operator("ConstantOfShape")
def _constant_of_shape(inputs: Sequence[Any], attributes: Mapping[str, Any]) -> Any:
    value, shape = attributes.get("value"), as_numbers(inputs[0])
    fill = 0.0 if value is None else value.reshape(-1)[0]
    if isinstance(fill, Tensor):
        if fill.dtype is torch.int64 and len(shape) == 1 and isinstance(shape[0], int):
            return [int(fill)] * shape[0]
        return torch.full(shape, fill.item(), dtype=fill.dtype)
    return torch.full(shape, fill)


@_operator("Range")
def _range(inputs: Sequence[Any], attributes: Mapping[str, Any]) -> Any:
    start, stop, step = (as_numbers(value)[0] for value in inputs)
    return torch.arange(start, stop, step)


@_operator("Pad")
def _pad(inputs: Sequence[Any], attributes: Mapping[str, Any]) -> Any:
    pads: list[Any] = attributes.get("pads", []) if _at(inputs, 1) is None else as_numbers(inputs[1])
    value = attributes.get("value", 0.0) if _at(inputs, 2) is None else as_numbers(inputs[2])[0]
    tensor, mode = inputs[0], attributes.get("mode", "constant")
    axes = _axes(inputs, attributes, 3) or list(range(tensor.ndim))
    half = len(pads) // 2
    both = {axis % tensor.ndim: (pads[number], pads[number + half]) for number, axis in enumerate(axes)}
    amounts = [amount for axis in reversed(range(tensor.ndim)) for amount in both.get(axis, (0, 0))]
    while len(amounts) > 2 and amounts[-1] == amounts[-2] == 0 and len(amounts) > 2 * min(half, 2):
        amounts = amounts[:-2]
    if mode == "constant":
        return functional.pad(tensor, amounts, value=value)
    while amounts and amounts[-1] == amounts[-2] == 0:
        amounts = amounts[:-2]
    return functional.pad(tensor, amounts, mode={"reflect": "reflect", "edge": "replicate"}[mode])


# Reductions


def _reduction(on_tensors: Callable[..., Any]) -> Operator:
    def compute(inputs: Sequence[Any], attributes: Mapping[str, Any]) -> Any:
        tensor = as_tensor(inputs[0])
        axes = _axes(inputs, attributes)
        if axes is None and attributes.get("noop_with_empty_axes", 0):
            return tensor
        chosen = list(range(tensor.ndim)) if axes is None else axes
        return on_tensors(tensor, chosen, bool(attributes.get("keepdims", 1)))

    return compute


for _name, _reduce in (
    ("ReduceMean", lambda x, axes, keep: x.mean(axes, keepdim=keep)),
    ("ReduceSum", lambda x, axes, keep: x.sum(axes, keepdim=keep)),
    ("ReduceMax", lambda x, axes, keep: x.amax(axes, keepdim=keep)),
    ("ReduceMin", lambda x, axes, keep: x.amin(axes, keepdim=keep)),
    ("ReduceL2", lambda x, axes, keep: x.pow(2).sum(axes, keepdim=keep).sqrt()),
    ("ReduceL1", lambda x, axes, keep: x.abs().sum(axes, keepdim=keep)),
    ("ReduceSumSquare", lambda x, axes, keep: x.pow(2).sum(axes, keepdim=keep)),
    ("ReduceLogSumExp", lambda x, axes, keep: x.logsumexp(axes, keepdim=keep)),
):
    OPERATORS[_name] = _reduction(_reduce)


@_operator("ReduceProd")
def _reduce_prod(inputs: Sequence[Any], attributes: Mapping[str, Any]) -> Any:
    if is_host(inputs[0]):
        product = math.prod(as_numbers(inputs[0]))
        return [product] if attributes.get("keepdims", 1) else product
    [axis] = _axes(inputs, attributes) or [0]
    return inputs[0].prod(axis, keepdim=bool(attributes.get("keepdims", 1)))


@_operator("ArgMax")
def _argmax(inputs: Sequence[Any], attributes: Mapping[str, Any]) -> Any:
    return inputs[0].argmax(attributes.get("axis", 0), keepdim=bool(attributes.get("keepdims", 1)))


@_operator("NonZero")
def _nonzero(inputs: Sequence[Any], attributes: Mapping[str, Any]) -> Any:
    return as_tensor(inputs[0]).nonzero().t()


@_operator("TopK")
def _topk(inputs: Sequence[Any], attributes: Mapping[str, Any]) -> Any:
    count = as_numbers(inputs[1])[0] if _at(inputs, 1) is not None else attributes["k"]
    values, indices = torch.topk(
        inputs[0],
        count,
        attributes.get("axis", -1),
        bool(attributes.get("largest", 1)),
        bool(attributes.get("sorted", 1)),
    )
    return values, indices


@_operator("Softmax")
def _softmax(inputs: Sequence[Any], attributes: Mapping[str, Any]) -> Any:
    return inputs[0].softmax(attributes.get("axis", -1))


@_operator("LogSoftmax")
def _log_softmax(inputs: Sequence[Any], attributes: Mapping[str, Any]) -> Any:
    return inputs[0].log_softmax(attributes.get("axis", -1))


@_operator("CumSum")
def _cumsum(inputs: Sequence[Any], attributes: Mapping[str, Any]) -> Any:
    if attributes.get("exclusive", 0) or attributes.get("reverse", 0):
        raise UnsupportedError("CumSum with exclusive or reverse")
    return as_tensor(inputs[0]).cumsum(as_numbers(inputs[1])[0])
