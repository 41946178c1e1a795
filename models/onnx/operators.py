"""Computation of ONNX's operators in PyTorch.

Owns: one function an operator, opset 9 to 22, of those in exports of image networks. Must not know graphs or files.
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
    1: torch.float32,
    2: torch.uint8,
    3: torch.int8,
    5: torch.int16,
    6: torch.int32,
    7: torch.int64,
    9: torch.bool,
    10: torch.float32,  # float16 in the file: the engine chooses the precision.
    11: torch.float64,
    16: torch.float32,
}


class UnsupportedError(ValueError):
    """Form of an operator that is not computed here; the message names it."""


def operator(*names: str) -> Callable[[Operator], Operator]:
    """Register a function for operators of these names."""

    def register(function: Operator) -> Operator:
        for name in names:
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


def tensors_of(values: Sequence[Any]) -> list[Tensor]:
    """Convert values to tensors, on the device of the first that is one."""
    like = next((value for value in values if isinstance(value, Tensor)), None)
    return [as_tensor(value, like) for value in values]


def input_at(inputs: Sequence[Any], index: int) -> Any:
    """Return an input, None if it is omitted."""
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
        return on_tensors(*tensors_of(inputs))

    return compute


def _divided(one: Tensor, other: Tensor) -> Tensor:
    if one.is_floating_point() or other.is_floating_point():
        return one / other
    return torch.div(one, other, rounding_mode="trunc")


def _truncated_remainder(one: Any, other: Any) -> Any:
    found = one % other
    return found - other if (one < 0) != (other < 0) and found else found


def _power(base: Tensor, exponent: Tensor) -> Tensor:
    if base.is_floating_point():
        return torch.pow(base, exponent.to(base.dtype))
    return torch.pow(base, exponent).to(base.dtype)


for _name, _on_tensors, _on_numbers in (
    ("Add", torch.add, lambda a, b: a + b),
    ("Sub", torch.sub, lambda a, b: a - b),
    ("Mul", torch.mul, lambda a, b: a * b),
    ("Div", _divided, lambda a, b: a // b),
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
    ("HardSwish", functional.hardswish),
    ("Mish", functional.mish),
    ("Sign", torch.sign),
    ("IsNaN", torch.isnan),
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


@operator("ArgMax")
def _argmax(inputs: Sequence[Any], attributes: Mapping[str, Any]) -> Any:
    axis, keep = attributes.get("axis", 0), bool(attributes.get("keepdims", 1))
    if attributes.get("select_last_index", 0):
        return inputs[0].shape[axis] - 1 - inputs[0].flip(axis).argmax(axis, keepdim=keep)
    return inputs[0].argmax(axis, keepdim=keep)


@operator("Mod")
def _modulo(inputs: Sequence[Any], attributes: Mapping[str, Any]) -> Any:
    """Compute the remainder with the sign of the divisor, or of the dividend for `fmod`."""
    if attributes.get("fmod", 0):
        return _elementwise(torch.fmod, _truncated_remainder)(inputs, attributes)
    return _elementwise(torch.remainder, lambda a, b: a % b)(inputs, attributes)


@operator("Swish")
def _swish(inputs: Sequence[Any], attributes: Mapping[str, Any]) -> Any:
    alpha = attributes.get("alpha", 1.0)
    return functional.silu(inputs[0]) if alpha == 1 else inputs[0] * torch.sigmoid(alpha * inputs[0])


@operator("Clip")
def _clip(inputs: Sequence[Any], attributes: Mapping[str, Any]) -> Any:
    low = attributes.get("min") if input_at(inputs, 1) is None else as_numbers(inputs[1])[0]
    high = attributes.get("max") if input_at(inputs, 2) is None else as_numbers(inputs[2])[0]
    return torch.clamp(as_tensor(inputs[0]), low, high)


@operator("Cast")
def _cast(inputs: Sequence[Any], attributes: Mapping[str, Any]) -> Any:
    dtype = _TYPES.get(attributes["to"])
    if dtype is None:
        raise UnsupportedError(f"Cast to type {attributes['to']}")
    if is_host(inputs[0]):
        if dtype in (torch.int64, torch.int32):
            return inputs[0]
        return as_tensor(inputs[0]).to(dtype)
    # A half or float of the file has the precision in which the network runs.
    if dtype is torch.float32 and inputs[0].is_floating_point():
        return inputs[0]
    return inputs[0].to(dtype)


# Reductions


def axes_of(inputs: Sequence[Any], attributes: Mapping[str, Any], index: int = 1) -> list[int] | None:
    """Return the axes, which are an input since opset 13 and were an attribute before."""
    given = input_at(inputs, index)
    if given is not None:
        return [int(axis) for axis in as_numbers(given)]
    return attributes.get("axes")


def _reduction(on_tensors: Callable[..., Any]) -> Operator:
    def compute(inputs: Sequence[Any], attributes: Mapping[str, Any]) -> Any:
        tensor = as_tensor(inputs[0])
        axes = axes_of(inputs, attributes)
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
    count = as_numbers(inputs[1])[0] if input_at(inputs, 1) is not None else attributes["k"]
    axis, largest = attributes.get("axis", -1), bool(attributes.get("largest", 1))
    # Of equal numbers the one of the lowest index comes first, which torch.topk does not promise.
    found = inputs[0].sort(dim=axis, descending=largest, stable=True)
    return tuple(each.narrow(axis, 0, count) for each in found)


@operator("CumSum")
def _cumsum(inputs: Sequence[Any], attributes: Mapping[str, Any]) -> Any:
    if attributes.get("exclusive", 0) or attributes.get("reverse", 0):
        raise UnsupportedError("CumSum with exclusive or reverse")
    return as_tensor(inputs[0]).cumsum(as_numbers(inputs[1])[0])
