"""ONNX's layers with weights, windows or images in PyTorch: convolutions, pooling, normalisation, resizing.

Owns: these operators, and the coordinates and weights of Resize (onnx/docs/Operators.md, Resize-19): PyTorch's own if
it computes the same, else a matrix or an index for each axis. Must not know graphs or files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from models.contract.model import Array
from models.onnx.operators import OPERATORS, UnsupportedError, as_tensor, input_at, numbers_at, operator
from models.vision import torchvision

_CONVOLUTIONS = {1: functional.conv1d, 2: functional.conv2d, 3: functional.conv3d}
_TRANSPOSED = {1: functional.conv_transpose1d, 2: functional.conv_transpose2d, 3: functional.conv_transpose3d}
_MAX_POOLS = {1: functional.max_pool1d, 2: functional.max_pool2d, 3: functional.max_pool3d}
_TORCHS_A = -0.75  # PyTorch's coefficient of the cubic kernel.
_TORCHS = {"linear": {1: "linear", 2: "bilinear", 3: "trilinear"}, "cubic": {2: "bicubic"}}


def _same_pads(tensor: Tensor, kernel: Sequence[int], attributes: Mapping[str, Any], rank: int) -> list[int]:
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
    begins, ends = list(pads[:rank]), list(pads[rank:])
    if begins == ends:
        return tensor, begins
    amounts = [amount for axis in reversed(range(rank)) for amount in (begins[axis], ends[axis])]
    return functional.pad(tensor, amounts, value=value), [0] * rank


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
    "GroupNormalization": lambda inputs, attributes: functional.group_norm(
        inputs[0], attributes["num_groups"], inputs[1], inputs[2], attributes.get("epsilon", 1e-5)
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


def _pool(name: str, inputs: Sequence[Any], attributes: Mapping[str, Any]) -> Any:
    kernel = attributes["kernel_shape"]
    rank = len(kernel)
    pads = _same_pads(inputs[0], kernel, attributes, rank)
    is_uneven, is_mean = pads[:rank] != pads[rank:], name == "AveragePool"
    dilations, counted = attributes.get("dilations", [1] * rank), bool(attributes.get("count_include_pad", 0))
    if is_mean and (rank != 2 or (is_uneven and not counted) or max(dilations) > 1):
        raise UnsupportedError("AveragePool with uneven padding or dilation")
    strides, ceil = attributes.get("strides", [1] * rank), bool(attributes.get("ceil_mode", 0))
    if ceil and is_uneven:
        raise UnsupportedError(f"{name} with ceil_mode and uneven padding")
    tensor, padding = _padded(inputs[0], pads, rank, 0.0 if is_mean else float("-inf"))
    if is_mean:
        return functional.avg_pool2d(tensor, kernel, strides, padding, ceil, counted)
    return _MAX_POOLS[rank](tensor, kernel, strides, padding, dilations, ceil)


OPERATORS |= {name: partial(_pool, name) for name in ("AveragePool", "MaxPool")}


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
    limits = torch.iinfo(torch.uint16 if dtype == torch.int32 else dtype)  # Constants of uint16 are int32 here.
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
    most = numbers_at(inputs, 2, [0])[0]
    iou = float(numbers_at(inputs, 3, [0])[0])
    least = numbers_at(inputs, 4, [float("-inf")])[0]
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
    places = attributes.get("coordinate_transformation_mode")
    if places not in ("half_pixel", "output_half_pixel"):
        raise UnsupportedError("RoiAlign that does not say where the pixels lie")
    values, boxes, images = inputs[0], inputs[1], as_tensor(inputs[2])
    size = attributes.get("output_height", 1), attributes.get("output_width", 1)
    rows = torch.cat((images.to(boxes.dtype).reshape(-1, 1), boxes), 1)
    scale, samples = attributes.get("spatial_scale", 1.0), attributes.get("sampling_ratio", 0)
    return torchvision.ops.roi_align(values, rows, size, scale, samples, places == "half_pixel")


@dataclass(frozen=True)
class _Axis:
    """One axis: its length before and after, and the factor between, which is not always their quotient."""

    before: int
    after: int
    factor: float

    def coordinates(self, how: str, dtype: type[np.floating[Any]] = np.float64) -> Array:
        """Return the position of each output among the inputs, of this dtype [after]. Raises UnsupportedError."""
        places = np.arange(self.after, dtype=dtype)
        if how == "asymmetric":
            return places / self.factor
        if how == "align_corners":
            if abs(self.before * self.factor - self.after) > 1e-3:
                raise UnsupportedError("Resize by align_corners to a length that is not whole")
            return places * (self.before - 1) / max(1, self.after - 1)
        if how == "tf_half_pixel_for_nn":
            return (places + 0.5) / self.factor
        middles = (places + 0.5) / self.factor - 0.5
        if how == "pytorch_half_pixel":
            return middles if self.after > 1 else np.zeros(1)
        if how != "half_pixel":
            raise UnsupportedError(f"Resize with coordinate_transformation_mode {how}")
        return middles

    def weights(self, how: str) -> Array:
        places = self.coordinates(how)
        first = np.floor(places)
        offsets = np.arange(2)
        shares = 1 - np.abs((places - first)[:, None] - offsets)
        indices = (first[:, None] + offsets).astype(np.int64)
        found = np.zeros((self.after, self.before))
        np.add.at(found, (np.arange(self.after)[:, None], indices.clip(0, self.before - 1)), shares)
        return found.astype(np.float32)


@operator("Resize")
def _resize(inputs: Sequence[Any], attributes: Mapping[str, Any]) -> Any:
    tensor, mode = inputs[0], attributes.get("mode", "nearest")
    how = attributes.get("coordinate_transformation_mode", "half_pixel")
    if "axes" in attributes or mode not in ("nearest", "linear", "cubic"):
        raise UnsupportedError(f"Resize of mode {mode}{' with axes' if 'axes' in attributes else ''}")
    given, wanted = [float(each) for each in numbers_at(inputs, 2, [])], numbers_at(inputs, 3, None)
    if wanted is not None:
        if wanted[1] != tensor.shape[1]:
            raise UnsupportedError("Resize of channels")
        axes = [
            _Axis(int(before), int(after), int(after) / int(before))
            for before, after in zip(tensor.shape[2:], wanted[2:], strict=True)
        ]
    else:
        if given[:2] != [1, 1]:
            raise UnsupportedError("Resize of channels or batches")
        axes = [
            _Axis(int(before), int(int(before) * factor), factor)
            for before, factor in zip(tensor.shape[2:], given[2:], strict=True)
        ]
    if attributes.get("antialias", 0) and mode != "nearest" and any(axis.factor < 1 for axis in axes):
        raise UnsupportedError("Resize with antialias")
    size = [axis.after for axis in axes]
    if mode == "nearest":
        return _to_nearest(tensor, axes, how, attributes.get("nearest_mode", "round_prefer_floor"))
    name = _TORCHS[mode].get(len(axes), "")
    if how == "pytorch_half_pixel" and min(size) > 1:
        how = "half_pixel"
    by_torch = bool(name) and how in ("half_pixel", "align_corners")
    if mode == "cubic" and not (by_torch and abs(attributes.get("cubic_coeff_a", _TORCHS_A) - _TORCHS_A) < 1e-6):
        raise UnsupportedError(f"Resize of mode cubic by {how}, or with another cubic_coeff_a than {_TORCHS_A}")
    if by_torch:
        for axis in axes:
            axis.coordinates(how)  # Raises UnsupportedError for coordinates that cannot be computed.
        scale = [axis.factor for axis in axes] if wanted is None and how == "half_pixel" else None
        return functional.interpolate(tensor, None if scale else size, scale, name, how == "align_corners")
    for place, axis in enumerate(axes, 2):
        if axis.after == axis.before and axis.factor == 1:
            continue
        weights = torch.from_numpy(axis.weights(how)).to(tensor)
        tensor = (tensor.transpose(place, -1) @ weights.t()).transpose(place, -1)
    return tensor


def _to_nearest(tensor: Tensor, axes: Sequence[_Axis], how: str, rounding: str) -> Tensor:
    found = [_nearest(axis.before, axis.after, axis.factor, how, rounding) for axis in axes]
    if all(usual for _, usual in found) and len(axes) <= len(_TORCHS["linear"]) and tensor.is_floating_point():
        return functional.interpolate(tensor, [axis.after for axis in axes])
    for place, (indices, _) in enumerate(found, 2):
        tensor = tensor.index_select(place, torch.tensor(indices, device=tensor.device))
    return tensor


def _nearest(before: int, after: int, factor: float, how: str, rounding: str) -> tuple[list[int], bool]:
    """Return the input's index for each output, and whether `interpolate` takes the same. Raises UnsupportedError."""
    places = _Axis(before, after, factor).coordinates(how, np.float32)
    rounded = {  # In float32, as by other runtimes: rounding decides between two neighbours.
        "round_prefer_floor": np.ceil(places - 0.5),
        "round_prefer_ceil": np.floor(places + 0.5),
        "floor": np.floor(places),
        "ceil": np.ceil(places),
        "opset 10": np.ceil(places) if factor < 1 else np.floor(places),
    }
    if rounding not in rounded:
        raise UnsupportedError(f"Resize with nearest_mode {rounding}")
    found = rounded[rounding].clip(0, before - 1).astype(np.int64)
    return found.tolist(), np.array_equal(found, np.arange(after) * before // after)


# TorchDynamo does not follow numpy's numbers into a condition. torch.compiler.assume_constant_result says the same, and
# imports all of it into each worker.
_nearest._dynamo_marked_constant = True  # type: ignore[attr-defined]
