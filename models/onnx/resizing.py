"""ONNX's Resize in PyTorch: PyTorch's own if it computes the same, else a matrix or an index for each axis.

Owns: the coordinates of outputs, and the weights of numbers there (onnx/docs/Operators.md, Resize-19). Must not know
graphs or files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from models.contract.model import Array
from models.onnx.operators import UnsupportedError, as_numbers, input_at, operator

_TORCHS_A = -0.75  # PyTorch's coefficient of the cubic kernel.
_TORCHS = {"linear": {1: "linear", 2: "bilinear", 3: "trilinear"}, "cubic": {2: "bicubic"}}


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
        if how == "half_pixel_symmetric":
            share = dtype(self.after) / (dtype(self.factor) * self.before)
            return np.asarray(middles + self.before / 2 * (1 - share), dtype)
        if how == "pytorch_half_pixel":
            return middles if self.after > 1 else np.zeros(1)
        if how != "half_pixel":
            raise UnsupportedError(f"Resize with coordinate_transformation_mode {how}")
        return middles

    def nearest(self, how: str, rounding: str) -> Array:
        """Return the index of the input for each output, int64 [after]. Raises UnsupportedError."""
        places = self.coordinates(how, np.float32)  # As other runtimes do: rounding decides between two neighbours.
        rounded = {
            "round_prefer_floor": np.ceil(places - 0.5),
            "round_prefer_ceil": np.floor(places + 0.5),
            "floor": np.floor(places),
            "ceil": np.ceil(places),
            "opset 10": np.ceil(places) if self.factor < 1 else np.floor(places),
        }
        if rounding not in rounded:
            raise UnsupportedError(f"Resize with nearest_mode {rounding}")
        found: Array = rounded[rounding].clip(0, self.before - 1).astype(np.int64)
        return found

    def weights(self, how: str, mode: str, a: float, inside: bool) -> Array:
        """Return each input's weight in each output, float32 [after, before]; `inside`: only inputs within weigh."""
        places = self.coordinates(how)
        first = np.floor(places)
        offsets = np.arange(2) if mode == "linear" else np.arange(-1, 3)
        distances = np.abs((places - first)[:, None] - offsets)
        shares = 1 - distances if mode == "linear" else _cubic(distances, a)
        indices = (first[:, None] + offsets).astype(np.int64)
        if inside:
            shares = np.where((indices >= 0) & (indices < self.before), shares, 0)
            shares /= shares.sum(1, keepdims=True)
        found = np.zeros((self.after, self.before))
        np.add.at(found, (np.arange(self.after)[:, None], indices.clip(0, self.before - 1)), shares)
        return found.astype(np.float32)


def _cubic(distances: Array, a: float) -> Array:
    """Compute Keys' kernel at distances of 0 to 2."""
    near = ((a + 2) * distances - (a + 3)) * distances**2 + 1
    far = ((distances - 5) * distances + 8) * distances * a - 4 * a
    shares: Array = np.where(distances <= 1, near, far)
    return shares


@operator("Resize")
def _resize(inputs: Sequence[Any], attributes: Mapping[str, Any]) -> Any:
    tensor, mode = inputs[0], attributes.get("mode", "nearest")
    how = attributes.get("coordinate_transformation_mode", "half_pixel")
    if "axes" in attributes or mode not in ("nearest", "linear", "cubic"):
        raise UnsupportedError(f"Resize of mode {mode}{' with axes' if 'axes' in attributes else ''}")
    if attributes.get("keep_aspect_ratio_policy", "stretch") != "stretch":
        raise UnsupportedError(f"Resize with keep_aspect_ratio_policy {attributes['keep_aspect_ratio_policy']}")
    sizes, factors = input_at(inputs, 3), input_at(inputs, 2)
    given = [] if factors is None else [float(each) for each in as_numbers(factors)]
    if sizes is not None:
        wanted = as_numbers(sizes)
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
    a, inside = attributes.get("cubic_coeff_a", _TORCHS_A), bool(attributes.get("exclude_outside", 0))
    usual = not inside and (mode == "linear" or abs(a - _TORCHS_A) < 1e-6)
    name = _TORCHS[mode].get(len(axes))
    if how == "pytorch_half_pixel" and min(size) > 1:
        how = "half_pixel"
    if name and usual and how in ("half_pixel", "align_corners"):
        for axis in axes:
            axis.coordinates(how)  # Raises UnsupportedError for coordinates that cannot be computed.
        scale = [axis.factor for axis in axes] if sizes is None and how == "half_pixel" else None
        return functional.interpolate(tensor, None if scale else size, scale, name, how == "align_corners")
    for place, axis in enumerate(axes, 2):
        if axis.after == axis.before and axis.factor == 1:
            continue
        weights = torch.from_numpy(axis.weights(how, mode, a, inside)).to(tensor)
        tensor = (tensor.transpose(place, -1) @ weights.t()).transpose(place, -1)
    return tensor


def _to_nearest(tensor: Tensor, axes: Sequence[_Axis], how: str, rounding: str) -> Tensor:
    indices = [axis.nearest(how, rounding) for axis in axes]
    same = [
        np.array_equal(found, np.arange(axis.after) * axis.before // axis.after)
        for found, axis in zip(indices, axes, strict=True)
    ]
    if all(same) and len(axes) <= len(_TORCHS["linear"]) and tensor.is_floating_point():
        return functional.interpolate(tensor, [axis.after for axis in axes])
    for place, found in enumerate(indices, 2):
        tensor = tensor.index_select(place, torch.from_numpy(found).to(tensor.device))
    return tensor
