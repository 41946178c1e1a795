"""ONNX's operators that only move or reshape numbers, in PyTorch.

Owns: these operators; models.onnx.operators has the register and the kinds of values. Must not know graphs or files.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from models.onnx.operators import (
    OPERATORS,
    UnsupportedError,
    as_numbers,
    as_tensor,
    axes_of,
    input_at,
    is_host,
    operator,
    tensors_of,
)

OPERATORS |= {
    "Size": lambda inputs, attributes: math.prod(inputs[0].shape),
    "Tile": lambda inputs, attributes: as_tensor(inputs[0]).repeat(as_numbers(inputs[1])),
    "Transpose": lambda inputs, attributes: inputs[0].permute(
        attributes.get("perm") or tuple(reversed(range(inputs[0].ndim)))
    ),
}


@operator("Shape")
def _shape(inputs: Sequence[Any], attributes: Mapping[str, Any]) -> Any:
    shape = [len(inputs[0])] if isinstance(inputs[0], list) else list(inputs[0].shape)
    return shape[attributes.get("start", 0) : attributes.get("end", len(shape))]


@operator("Reshape")
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


@operator("Flatten")
def _flatten(inputs: Sequence[Any], attributes: Mapping[str, Any]) -> Any:
    axis = attributes.get("axis", 1)
    axis = axis + inputs[0].ndim if axis < 0 else axis
    if axis == 1:
        return inputs[0].flatten(1)
    return inputs[0].reshape(math.prod(inputs[0].shape[:axis]), -1)


@operator("Unsqueeze")
def _unsqueeze(inputs: Sequence[Any], attributes: Mapping[str, Any]) -> Any:
    axes = axes_of(inputs, attributes) or []
    if is_host(inputs[0]) and not isinstance(inputs[0], list) and axes in ([0], [-1]):
        return [inputs[0]]
    tensor = as_tensor(inputs[0])
    rank = tensor.ndim + len(axes)
    for axis in sorted(axis % rank for axis in axes):
        tensor = tensor.unsqueeze(axis)
    return tensor


@operator("Squeeze")
def _squeeze(inputs: Sequence[Any], attributes: Mapping[str, Any]) -> Any:
    axes = axes_of(inputs, attributes)
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
    return torch.cat(tensors_of(inputs), attributes["axis"])


@operator("Split")
def _split(inputs: Sequence[Any], attributes: Mapping[str, Any]) -> Any:
    axis = attributes.get("axis", 0)
    sizes = attributes.get("split") if input_at(inputs, 1) is None else as_numbers(inputs[1])
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
    starts: list[Any] = attributes.get("starts", []) if input_at(inputs, 1) is None else as_numbers(inputs[1])
    ends: list[Any] = attributes.get("ends", []) if input_at(inputs, 2) is None else as_numbers(inputs[2])
    axes = axes_of(inputs, attributes, 3)
    steps = [1] * len(starts) if input_at(inputs, 4) is None else as_numbers(inputs[4])
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


@operator("GatherElements")
def _gather_elements(inputs: Sequence[Any], attributes: Mapping[str, Any]) -> Any:
    source, index = inputs
    axis = attributes.get("axis", 0) % source.ndim
    index = torch.where(index < 0, index + source.shape[axis], index)
    return torch.gather(source, axis, index)


@operator("ScatterElements")
def _scatter_elements(inputs: Sequence[Any], attributes: Mapping[str, Any]) -> Any:
    if attributes.get("reduction", "none") != "none":
        raise UnsupportedError("ScatterElements with a reduction")
    source, index, updates = tensors_of(inputs)
    axis = attributes.get("axis", 0) % source.ndim
    index = torch.where(index < 0, index + source.shape[axis], index)
    return source.scatter(axis, index, updates.to(source.dtype))


@operator("GatherND")
def _gather_nd(inputs: Sequence[Any], attributes: Mapping[str, Any]) -> Any:
    if attributes.get("batch_dims", 0):
        raise UnsupportedError("GatherND with batch_dims")
    source, index = tensors_of(inputs)
    return source[tuple(index.unbind(-1))]


@operator("ScatterND")
def _scatter_nd(inputs: Sequence[Any], attributes: Mapping[str, Any]) -> Any:
    if attributes.get("reduction", "none") != "none":
        raise UnsupportedError("ScatterND with a reduction")
    source, index, updates = tensors_of(inputs)
    return source.index_put(tuple(index.unbind(-1)), updates.to(source.dtype))


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
    fill = 0.0 if value is None else value.reshape(-1)[0]
    if isinstance(fill, Tensor):
        if fill.dtype is torch.int64 and len(shape) == 1 and isinstance(shape[0], int):
            return [int(fill)] * shape[0]
        return torch.full(shape, fill.item(), dtype=fill.dtype)
    return torch.full(shape, fill)


@operator("Range")
def _range(inputs: Sequence[Any], attributes: Mapping[str, Any]) -> Any:
    start, stop, step = (as_numbers(value)[0] for value in inputs)
    return torch.arange(start, stop, step)


_PADS = {"reflect": "reflect", "edge": "replicate", "wrap": "circular"}


@operator("Pad")
def _pad(inputs: Sequence[Any], attributes: Mapping[str, Any]) -> Any:
    pads: list[Any] = attributes.get("pads", []) if input_at(inputs, 1) is None else as_numbers(inputs[1])
    value = attributes.get("value", 0.0) if input_at(inputs, 2) is None else as_numbers(inputs[2])[0]
    tensor, mode = inputs[0], attributes.get("mode", "constant")
    axes = axes_of(inputs, attributes, 3) or list(range(tensor.ndim))
    half = len(pads) // 2
    both = {axis % tensor.ndim: (pads[number], pads[number + half]) for number, axis in enumerate(axes)}
    amounts = [amount for axis in reversed(range(tensor.ndim)) for amount in both.get(axis, (0, 0))]
    while len(amounts) > 2 and amounts[-1] == amounts[-2] == 0 and len(amounts) > 2 * min(half, 2):
        amounts = amounts[:-2]
    if mode == "constant":
        return functional.pad(tensor, amounts, value=value)
    while amounts and amounts[-1] == amounts[-2] == 0:
        amounts = amounts[:-2]
    return functional.pad(tensor, amounts, mode=_PADS[mode])
