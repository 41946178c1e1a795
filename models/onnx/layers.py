"""ONNX's layers with weights, windows or images in PyTorch: convolutions, pooling, normalisation.

Owns: these operators; models.onnx.operators has all others and the register. Must not know graphs or files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from models.onnx.operators import OPERATORS, UnsupportedError, as_numbers, as_tensor, input_at, operator
from models.vision import torchvision

_CONVOLUTIONS = {1: functional.conv1d, 2: functional.conv2d, 3: functional.conv3d}
_TRANSPOSED = {1: functional.conv_transpose1d, 2: functional.conv_transpose2d, 3: functional.conv_transpose3d}
_MAX_POOLS = {1: functional.max_pool1d, 2: functional.max_pool2d, 3: functional.max_pool3d}


def _same_pads(tensor: Tensor, kernel: Sequence[int], attributes: Mapping[str, Any], rank: int) -> list[int]:
    """Return the padding in the order of `pads`: all beginnings, then all ends."""
    mode = attributes.get("auto_pad", "NOTSET")
    if mode in ("NOTSET", ""):
        return list(attributes.get("pads", [0] * 2 * rank))
    if mode == "VALID":
        return [0] * 2 * rank
    strides, dilations = attributes.get("strides", [1] * rank), attributes.get("dilations", [1] * rank)
    begins, ends = [], []
    for axis in range(rank):
        length = int(tensor.shape[2 + axis])
        reach = (kernel[axis] - 1) * dilations[axis] + 1
        total = max(0, (-(-length // strides[axis]) - 1) * strides[axis] + reach - length)
        small = total // 2
        begins.append(small if mode == "SAME_UPPER" else total - small)
        ends.append(total - begins[-1])
    return begins + ends


def _padded(tensor: Tensor, pads: Sequence[int], rank: int, value: float) -> tuple[Tensor, list[int]]:
    """Return the tensor, and the remaining padding: one number an axis, if both sides are equal."""
    begins, ends = list(pads[:rank]), list(pads[rank:])
    if begins == ends:
        return tensor, begins
    amounts = [amount for axis in reversed(range(rank)) for amount in (begins[axis], ends[axis])]
    return functional.pad(tensor, amounts, value=value), [0] * rank


def _without_padding_alone(
    pooled: Tensor, tensor: Tensor, pads: Sequence[int], attributes: Mapping[str, Any], rank: int
) -> Tensor:
    """Drop the outputs whose window begins after the tensor: `ceil_mode` makes none of padding alone."""
    strides = attributes.get("strides", [1] * rank)
    if not attributes.get("ceil_mode", 0) or list(pads[:rank]) == list(pads[rank:]):
        return pooled  # PyTorch does it for the padding that it knows of.
    for axis in range(rank):
        most = -(-(int(tensor.shape[2 + axis]) + pads[axis]) // strides[axis])
        pooled = pooled.narrow(2 + axis, 0, min(most, int(pooled.shape[2 + axis])))
    return pooled


@operator("Conv")
def _conv(inputs: Sequence[Any], attributes: Mapping[str, Any]) -> Any:
    tensor, weight = inputs[0], inputs[1]
    rank = weight.ndim - 2
    tensor, padding = _padded(tensor, _same_pads(tensor, weight.shape[2:], attributes, rank), rank, 0.0)
    return _CONVOLUTIONS[rank](
        tensor,
        weight,
        input_at(inputs, 2),
        attributes.get("strides", [1] * rank),
        padding,
        attributes.get("dilations", [1] * rank),
        attributes.get("group", 1),
    )


@operator("ConvTranspose")
def _conv_transpose(inputs: Sequence[Any], attributes: Mapping[str, Any]) -> Any:
    tensor, weight = inputs[0], inputs[1]
    rank = weight.ndim - 2
    pads = attributes.get("pads", [0] * 2 * rank)
    if pads[:rank] != pads[rank:] or attributes.get("auto_pad", "NOTSET") != "NOTSET" or "output_shape" in attributes:
        raise UnsupportedError("ConvTranspose with uneven padding")
    return _TRANSPOSED[rank](
        tensor,
        weight,
        input_at(inputs, 2),
        attributes.get("strides", [1] * rank),
        pads[:rank],
        attributes.get("output_padding", [0] * rank),
        attributes.get("group", 1),
        attributes.get("dilations", [1] * rank),
    )


@operator("Gemm")
def _gemm(inputs: Sequence[Any], attributes: Mapping[str, Any]) -> Any:
    one, other, bias = inputs[0], inputs[1], input_at(inputs, 2)
    alpha, beta = attributes.get("alpha", 1.0), attributes.get("beta", 1.0)
    one = one.t() if attributes.get("transA", 0) else one
    if alpha == 1 and beta == 1 and (bias is None or bias.ndim == 1):
        return functional.linear(one, other if attributes.get("transB", 0) else other.t(), bias)
    product = alpha * (one @ (other.t() if attributes.get("transB", 0) else other))
    return product if bias is None else product + beta * bias


OPERATORS |= {
    "MatMul": lambda inputs, attributes: torch.matmul(inputs[0], inputs[1]),
    "Einsum": lambda inputs, attributes: torch.einsum(attributes["equation"], *inputs),
    "GlobalAveragePool": lambda inputs, attributes: inputs[0].mean(list(range(2, inputs[0].ndim)), keepdim=True),
    "GlobalMaxPool": lambda inputs, attributes: inputs[0].amax(list(range(2, inputs[0].ndim)), keepdim=True),
    "InstanceNormalization": lambda inputs, attributes: functional.instance_norm(
        inputs[0], None, None, inputs[1], inputs[2], True, 0.0, attributes.get("epsilon", 1e-5)
    ),
    "BatchNormalization": lambda inputs, attributes: functional.batch_norm(
        inputs[0], inputs[3], inputs[4], inputs[1], inputs[2], False, 0.0, attributes.get("epsilon", 1e-5)
    ),
}


@operator("LayerNormalization")
def _layer_norm(inputs: Sequence[Any], attributes: Mapping[str, Any]) -> Any:
    tensor, scale = inputs[0], inputs[1]
    axis, bias, epsilon = attributes.get("axis", -1) % tensor.ndim, input_at(inputs, 2), attributes.get("epsilon", 1e-5)
    shape = list(scale.shape)
    if shape == list(tensor.shape[axis:]) and (bias is None or bias.shape == scale.shape):
        return functional.layer_norm(tensor, shape, scale, bias, epsilon)
    found = functional.layer_norm(tensor, list(tensor.shape[axis:]), None, None, epsilon) * scale
    return found if bias is None else found + bias


@operator("MaxPool")
def _max_pool(inputs: Sequence[Any], attributes: Mapping[str, Any]) -> Any:
    kernel = attributes["kernel_shape"]
    rank = len(kernel)
    pads = _same_pads(inputs[0], kernel, attributes, rank)
    tensor, padding = _padded(inputs[0], pads, rank, float("-inf"))
    found = _MAX_POOLS[rank](
        tensor,
        kernel,
        attributes.get("strides", [1] * rank),
        padding,
        attributes.get("dilations", [1] * rank),
        bool(attributes.get("ceil_mode", 0)),
    )
    return _without_padding_alone(found, inputs[0], pads, attributes, rank)


@operator("AveragePool")
def _average_pool(inputs: Sequence[Any], attributes: Mapping[str, Any]) -> Any:
    kernel = attributes["kernel_shape"]
    rank = len(kernel)
    pads = _same_pads(inputs[0], kernel, attributes, rank)
    counted = bool(attributes.get("count_include_pad", 0))
    if rank != 2 or (pads[:rank] != pads[rank:] and not counted) or max(attributes.get("dilations", [1])) > 1:
        raise UnsupportedError("AveragePool with uneven padding or dilation")
    tensor, padding = _padded(inputs[0], pads, rank, 0.0)
    strides, ceil = attributes.get("strides", [1] * rank), bool(attributes.get("ceil_mode", 0))
    found = functional.avg_pool2d(tensor, kernel, strides, padding, ceil, counted)
    return _without_padding_alone(found, inputs[0], pads, attributes, rank)


@operator("GridSample")
def _grid_sample(inputs: Sequence[Any], attributes: Mapping[str, Any]) -> Any:
    modes = {"linear": "bilinear", "cubic": "bicubic"}
    mode = attributes.get("mode", "bilinear")
    return functional.grid_sample(
        inputs[0],
        inputs[1],
        modes.get(mode, mode),
        attributes.get("padding_mode", "zeros"),
        bool(attributes.get("align_corners", 0)),
    )


@operator("DepthToSpace")
def _depth_to_space(inputs: Sequence[Any], attributes: Mapping[str, Any]) -> Any:
    if attributes.get("mode", "DCR") == "CRD":
        return functional.pixel_shuffle(inputs[0], attributes["blocksize"])
    size = attributes["blocksize"]
    count, channels, height, width = inputs[0].shape
    blocks = inputs[0].reshape(count, size, size, channels // size**2, height, width)
    return blocks.permute(0, 3, 4, 1, 5, 2).reshape(count, channels // size**2, height * size, width * size)


def _quantisation(value: Any, tensor: Tensor, attributes: Mapping[str, Any]) -> Tensor:
    factors = as_tensor(value).to(torch.float32)
    if factors.ndim != 1 or tensor.ndim < 2:
        return factors.reshape(()) if factors.numel() == 1 else factors
    shape = [1] * tensor.ndim
    shape[attributes.get("axis", 1)] = -1
    return factors.reshape(shape)


@operator("QuantizeLinear")
def _quantise(inputs: Sequence[Any], attributes: Mapping[str, Any]) -> Any:
    tensor = inputs[0]
    zero = input_at(inputs, 2)
    dtype = torch.uint8 if zero is None else zero.dtype
    limits = torch.iinfo(dtype)
    shift = 0.0 if zero is None else _quantisation(zero, tensor, attributes)
    steps = torch.round(tensor.float() / _quantisation(inputs[1], tensor, attributes)) + shift
    return steps.clamp(limits.min, limits.max).to(dtype)


@operator("DequantizeLinear")
def _dequantise(inputs: Sequence[Any], attributes: Mapping[str, Any]) -> Any:
    tensor = as_tensor(inputs[0])
    zero = input_at(inputs, 2)
    shift = 0.0 if zero is None else _quantisation(zero, tensor, attributes)
    return (tensor.to(torch.float32) - shift) * _quantisation(inputs[1], tensor, attributes)


@operator("NonMaxSuppression")
def _non_maximum_suppression(inputs: Sequence[Any], attributes: Mapping[str, Any]) -> Any:
    """Choose boxes [n, k, 4] by scores [n, classes, k]: int64 [found, 3], image, class, box. For eager engines only."""
    boxes, scores = inputs[0], inputs[1]
    most = as_numbers(inputs[2])[0] if input_at(inputs, 2) is not None else 0
    iou = float(as_numbers(inputs[3])[0]) if input_at(inputs, 3) is not None else 0.0
    least = float(as_numbers(inputs[4])[0]) if input_at(inputs, 4) is not None else float("-inf")
    found = []
    for image in range(boxes.shape[0]):
        corners = boxes[image].float()
        if attributes.get("center_point_box", 0):
            corners = torch.cat((corners[:, :2] - corners[:, 2:] / 2, corners[:, :2] + corners[:, 2:] / 2), 1)
        else:  # y1, x1, y2, x2: the overlap is the same with the axes exchanged; corners come in any order.
            corners = torch.cat((corners[:, :2].minimum(corners[:, 2:]), corners[:, :2].maximum(corners[:, 2:])), 1)
        for number in range(scores.shape[1]):
            candidates = (scores[image, number] > least).nonzero()[:, 0]
            kept = torchvision.ops.nms(corners[candidates], scores[image, number, candidates].float(), iou)[:most]
            places = candidates[kept]
            found.append(torch.stack((torch.full_like(places, image), torch.full_like(places, number), places), 1))
    return torch.cat(found) if found else torch.zeros((0, 3), dtype=torch.int64)


@operator("RoiAlign")
def _roi_align(inputs: Sequence[Any], attributes: Mapping[str, Any]) -> Any:
    """Compute [k, c, height, width] from [n, c, h, w], boxes [k, 4] and the image of each [k]; k may be 0."""
    places = attributes.get("coordinate_transformation_mode")
    if places not in ("half_pixel", "output_half_pixel"):
        raise UnsupportedError("RoiAlign that does not say where the pixels lie")
    if attributes.get("mode", "avg") != "avg":
        raise UnsupportedError(f"RoiAlign by {attributes['mode']}")
    values, boxes, images = inputs[0], inputs[1], as_tensor(inputs[2])
    size = attributes.get("output_height", 1), attributes.get("output_width", 1)
    rows = torch.cat((images.to(boxes.dtype).reshape(-1, 1), boxes), 1)
    scale, samples = attributes.get("spatial_scale", 1.0), attributes.get("sampling_ratio", 0)
    return torchvision.ops.roi_align(values, rows, size, scale, samples, places == "half_pixel")
