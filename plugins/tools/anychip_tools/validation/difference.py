"""Distance of arrays from their true values.

Owns: the measures and the limits of single layers. Must not know what computed them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

# The largest relative error of one layer on the inputs of the reference, by precision. Rounding of the result alone is
# 2^-11 in fp16 and 2^-8 in bf16; convolutions in TF32, which NVIDIA's cards use for float32, round to 2^-11.
LAYER_LIMITS = {"fp32": 2e-3, "fp16": 5e-3, "bf16": 2e-2, "int8": 0.2}
# The same for everything up to a layer: rounding adds up over the depth.
PREFIX_LIMITS = {"fp32": 1e-2, "fp16": 5e-2, "bf16": 0.15, "int8": 0.4}
TOLERANCES = {"fp32": 1e-3, "fp16": 1e-2, "bf16": 5e-2, "int8": 0.2}
"""Tolerances by precision: an element is within if its error is below this part of its output's spread."""


@dataclass(frozen=True)
class Difference:
    """Errors over all floating point elements. `relative`: norm of the error by norm of the truth; `cosine`: of both;
    `within`: share of elements within the tolerance. Infinite where shapes or the places of NaN differ.
    """

    max_abs: float
    mean_abs: float
    relative: float
    cosine: float
    within: float


NOWHERE = Difference(float("inf"), float("inf"), float("inf"), 0.0, 0.0)
EQUAL = Difference(0.0, 0.0, 0.0, 1.0, 1.0)


def difference(expected: Sequence[Array], given: Sequence[Array], tolerance: float) -> Difference:
    """Compare several outputs together; leave whole numbers to the measures that know their meaning."""
    if [each.shape for each in expected] != [each.shape for each in given]:
        return NOWHERE
    total, error_sum, error_squares, truth_squares = 0, 0.0, 0.0, 0.0
    given_squares, product, worst, good = 0.0, 0.0, 0.0, 0
    for one, other in zip(expected, given, strict=True):
        if one.dtype.kind != "f" or not one.size:
            continue
        wanted, have = one.astype(np.float64).reshape(-1), other.astype(np.float64).reshape(-1)
        finite = np.isfinite(wanted) & np.isfinite(have)
        if not np.array_equal(wanted[~finite], have[~finite], equal_nan=True):
            return NOWHERE
        wanted, have = wanted[finite], have[finite]
        errors = np.abs(wanted - have)
        spread = max(float(wanted.std()), 1e-12) if wanted.size else 1.0
        total += errors.size
        worst = max(worst, float(errors.max(initial=0.0)))
        error_sum += float(errors.sum())
        error_squares += float((errors**2).sum())
        truth_squares += float((wanted**2).sum())
        given_squares += float((have**2).sum())
        product += float((wanted * have).sum())
        good += int((errors <= tolerance * spread).sum())
    if not total:
        return EQUAL
    norms = (truth_squares * given_squares) ** 0.5
    relative = (error_squares / truth_squares) ** 0.5 if truth_squares else (float("inf") if error_squares else 0.0)
    cosine = product / norms if norms else float(error_squares == 0)
    return Difference(worst, error_sum / total, relative, cosine, good / total)
