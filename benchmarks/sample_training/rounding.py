"""Rounding of trained weights, so that packing (git, a wheel, an image's layer) makes the sample files smaller.

Owns: the coarseness of a layer's weights. Must not know networks, files or training.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rounded(weights: Tensor, steps: int) -> Tensor:
    """Round a convolution's or linear layer's weights [outputs, ...] to whole steps; the dtype stays.

    `steps`: at most so many lie between 0 and the largest weight of an output channel; a power of two (int8 has 128).
    The step of an output channel is a power of two: the low bits of a float are then 0, and deflate drops those.
    Vectors (biases, the statistics of BatchNorm) are left as they are: they are few and count for much.
    """
    if weights.ndim < 2 or not weights.is_floating_point():
        return weights
    largest = weights.detach().float().flatten(1).abs().amax(dim=1)
    mantissa, exponent = torch.frexp(largest / steps)
    exponent -= (mantissa == 0.5).to(exponent.dtype)  # already a power of two
    # float16 has nothing finer than 2^-24; a channel that is all zero takes any step.
    step = torch.ldexp(torch.ones_like(largest), exponent.clamp(min=-24)).view(-1, *(1,) * (weights.ndim - 1))
    return ((weights.float() / step).round() * step).to(weights.dtype)
