"""Substitutes for operators, made of plainer ones, for devices that lack them.

Owns: the arithmetic, as exact as PyTorch's own kernels: those compute half precision in float32, too. Must not know
when it is used, or on which device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor


def _wide(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @wraps(function)
    def in_float32(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if x.dtype in (torch.float16, torch.bfloat16):
            return function(x.float(), *args, **kwargs).to(x.dtype)
        return function(x, *args, **kwargs)

    return in_float32


@_wide
def _gelu(x: Tensor, *, approximate: str = "none") -> Tensor:
    if approximate == "tanh":
        return 0.5 * x * (1 + (math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)).tanh())
    return 0.5 * x * (1 + (x * math.sqrt(0.5)).erf())


def _softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    x, dtype = (x.float() if x.dtype in (torch.float16, torch.bfloat16) else x), x.dtype
    powers = (x - x.amax(dim, keepdim=True)).exp()
    sums = powers.sum(dim, keepdim=True)
    return (powers / sums).to(torch.float32 if half_to_float else dtype)


def _roll(x: Tensor, shifts: Sequence[int], dims: Sequence[int] = ()) -> Tensor:
    if not dims:
        return _roll(x.flatten(), shifts, (0,)).view_as(x)
    for shift, dim in zip(shifts, dims, strict=True):
        if x.shape[dim]:
            first = -shift % x.shape[dim]
            x = torch.cat((x.narrow(dim, first, x.shape[dim] - first), x.narrow(dim, 0, first)), dim)
    return x


@_wide
def _adaptive_avg_pool2d(x: Tensor, output_size: Sequence[int]) -> Tensor:
    for dim, count in zip((-2, -1), output_size, strict=True):
        size = x.shape[dim]
        spans = [(i * size // count, -(-(i + 1) * size // count)) for i in range(count)]
        x = torch.cat([x.narrow(dim, start, end - start).mean(dim, keepdim=True) for start, end in spans], dim)
    return x


def _upsample_nearest2d(
    x: Tensor, output_size: Sequence[int], scales_h: float | None = None, scales_w: float | None = None
) -> Tensor:
    for dim, count, scale in zip((-2, -1), output_size, (scales_h, scales_w), strict=True):
        size = x.shape[dim]
        if count % size == 0 and scale in (None, count / size):
            shape = list(x.unsqueeze(dim).shape)
            shape[dim] = count // size
            x = x.unsqueeze(dim).expand(shape).flatten(dim - 1, dim)
        else:
            step = torch.tensor(1 / scale if scale else size / count, dtype=torch.float32)  # As the kernels have it.
            rows = (torch.arange(count, dtype=torch.float32) * step).floor().long().clamp(max=size - 1)
            x = x.index_select(dim, rows.to(x.device))
    return x


REPLACEMENTS: Mapping[str, Callable[..., Tensor]] = {
    "aten::silu": _wide(lambda x: x * x.sigmoid()),
    "aten::hardsigmoid": _wide(lambda x: (x + 3).clamp(0, 6) / 6),
    "aten::hardswish": _wide(lambda x: x * (x + 3).clamp(0, 6) / 6),
    "aten::hardtanh": lambda x, min_val=-1, max_val=1: x.clamp(min_val, max_val),
    "aten::gelu": _gelu,
    "aten::_softmax": _softmax,
    "aten::roll": _roll,
    "aten::_adaptive_avg_pool2d": _adaptive_avg_pool2d,
    "aten::adaptive_avg_pool2d": _adaptive_avg_pool2d,
    "aten::upsample_nearest2d": _upsample_nearest2d,
}
"""Substitutes by operator; each also serves its in-place and `out=` forms."""
