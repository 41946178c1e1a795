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
    parts = []
    for one, other in zip(expected, given, strict=True):
        if one.dtype.kind != "f":
            continue
        wanted, have = one.astype(np.float64).reshape(-1), other.astype(np.float64).reshape(-1)
        finite = np.isfinite(wanted) & np.isfinite(have)
        if not np.array_equal(wanted[~finite], have[~finite], equal_nan=True):
            return NOWHERE
        wanted, have = wanted[finite], have[finite]
        spread = max(float(wanted.std()), 1e-12) if wanted.size else 1.0
        parts.append((wanted, have, np.abs(wanted - have) <= tolerance * spread))
    if not any(wanted.size for wanted, _, _ in parts):
        return EQUAL
    wanted, have, good = (np.concatenate(each) for each in zip(*parts, strict=True))
    errors = np.abs(wanted - have)
    error, truth, norm = (float(np.linalg.norm(each)) for each in (errors, wanted, have))
    relative = error / truth if truth else (float("inf") if error else 0.0)
    cosine = float(wanted @ have) / (truth * norm) if truth and norm else float(error == 0)
    return Difference(float(errors.max()), float(errors.mean()), relative, cosine, float(good.mean()))
