"""Errors of outputs against the reference's, and accuracy of answers.

Must not know tasks, executables or engines: it compares arrays. Every measure is an error: 0 is perfect
(docs/precision.md has the measured errors).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from models.contract.model import Array, Options

Limits = Mapping[str, Mapping[str, float]]
"""The largest error of each measure, by precision. A missing precision is not served."""

# The errors of correct engines were measured: they are half of these limits or less. Wrong outputs (two outputs
# exchanged, all numbers 5 % too large) exceed at least one of them.
TENSOR_LIMITS: Limits = {
    "fp32": {"cosine": 1e-5, "error": 0.01, "scale": 0.002, "different": 0.001},
    "fp16": {"cosine": 1e-3, "error": 0.05, "scale": 0.005, "different": 0.01},
    "bf16": {"cosine": 8e-3, "error": 0.5, "scale": 0.02, "different": 0.05},
}
LEAST_SPREAD = 0.01  # As a fraction of the output's root mean square.

Answer = Mapping[str, Any]


class Accuracy(ABC):
    """Accuracy of answers. `name`: of the measure; `loss_limit`: the loss of it that int8 may have; `options`: the
    request's options for the measured answers.
    """

    name: ClassVar[str]
    loss_limit: ClassVar[float]
    options: ClassVar[Options] = Options()

    @abstractmethod
    def of(self, truth: Sequence[Any], answers: Sequence[Answer]) -> float:
        """Compute the measure, 1 if all answers are right. `truth`: the truth of each image."""

    @abstractmethod
    def truth(self, answer: Answer) -> Any:
        """Return the truth of an image for which `answer` is right."""


def of_tensors(expected: Sequence[Array], outputs: Sequence[Array]) -> dict[str, float]:
    """Compute the errors of any tensors [n, ...]; each measure is that of the worst output.

    `cosine`: 1 - cosine of an item's numbers; `error`: the largest error, in standard deviations of the output over all
    probes; `scale`: how far the best common factor is from 1; `different`: fraction of integers that differ, and 1 if
    NaN or infinity are at different places.
    """
    worst = {"cosine": 0.0, "error": 0.0, "scale": 0.0, "different": 0.0}
    for wanted, given in zip(expected, outputs, strict=True):
        floats = wanted.dtype.kind == "f"
        errors = _of_floats(wanted, given) if floats else {"different": float((wanted != given).mean())}
        worst = {name: max(value, errors.get(name, 0.0)) for name, value in worst.items()}
    return worst


def _of_floats(expected: Array, output: Array) -> dict[str, float]:
    wanted, given = (each.astype(np.float64).reshape(len(each), -1) for each in (expected, output))
    finite = np.isfinite(wanted) & np.isfinite(given)
    strange = ~finite & (wanted != given) & ~(np.isnan(wanted) & np.isnan(given))
    wanted[~finite] = given[~finite] = 0
    norms = np.linalg.norm(wanted, axis=1) * np.linalg.norm(given, axis=1)
    return {
        "cosine": float((1 - divided((wanted * given).sum(1), norms))[norms > 0].max(initial=0.0)),
        "error": in_deviations(wanted, given),
        "scale": scale_error(wanted, given) if wanted.any() else 0.0,
        "different": float(strange.any()),
    }


def in_deviations(wanted: Array, given: Array) -> float:
    """Compute the largest error, in standard deviations of `wanted`.

    The spread of almost constant numbers is rounding noise, so their size replaces it.
    """
    wanted = wanted.astype(np.float64)
    spread = max(float(wanted.std()), LEAST_SPREAD * float(np.sqrt((wanted**2).mean())))
    return float(divided(np.abs(wanted - given).max(), spread))


def scale_error(wanted: Array, given: Array) -> float:
    """Compute the distance of the best common factor from 1.

    It is the least-squares factor: random errors average out of it, a systematic one does not.
    """
    return float(abs(divided((wanted * given).sum(), (wanted * wanted).sum()) - 1))


def divided(numerator: Any, denominator: Any) -> Any:
    """Divide, with 0 / 0 = 0: both sides empty or all zero is no error."""
    numerator, denominator = np.asarray(numerator, np.float64), np.asarray(denominator, np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where((numerator == 0) & (denominator == 0), 0.0, numerator / denominator)
