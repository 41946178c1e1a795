"""Regression: named numbers, one or several an image.

Owns: this task, the answer's form, and the precision gate's measures of it. Must not know networks.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from models.contract.measures import LEAST_SPREAD, Limits, divided, scale_error
from models.contract.model import Array, Options, OutputSpec, Placement
from models.contract.task_adapter import AdaptedFile, TaskAdapter

if TYPE_CHECKING:
    from torch import Tensor

_LIMITS: Limits = {
    "fp32": {"value": 0.01, "scale": 0.002},
    "fp16": {"value": 0.05, "scale": 0.005},
    "bf16": {"value": 0.5, "scale": 0.02},
    "int8": {"value": 0.75, "scale": 0.04},
}


class Regress(TaskAdapter):
    """Regression: all numbers of all outputs, in their order; the labels are their names."""

    resize = "stretch"
    known_options = ()
    limits = _LIMITS
    outputs = ("values",)
    """`values`, [n, k]."""

    def __init__(self, file: AdaptedFile) -> None:
        """Raise ValueError if the labels are of another number."""
        super().__init__(file)
        count = sum(prod(shape[1:]) for shape in file.shapes)
        self.names = file.labels or (("value",) if count == 1 else tuple(f"value {n}" for n in range(count)))
        if len(self.names) != count:
            raise ValueError(f"it answers with {count} numbers, and there are {len(self.names)} labels for them")

    def compute(self, outputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the numbers, float32 [n, k]."""
        import torch

        return (torch.cat([each.float().reshape(len(each), -1) for each in outputs], dim=1),)

    def postprocess(self, outputs: Sequence[Array], placement: Placement, options: Options) -> dict[str, Any]:
        """Return `values`, by name."""
        return {"values": {name: float(str(value)) for name, value in zip(self.names, outputs[0], strict=True)}}

    @property
    def answers(self) -> tuple[OutputSpec, ...]:
        """Tensor of the numbers."""
        return (OutputSpec("values", "FP32", (-1, len(self.names))),)

    def tensors(self, outputs: Sequence[Array], placement: Placement, options: Options) -> dict[str, Array]:
        """Return `values`, float32 [k]."""
        return {"values": outputs[0]}

    def measures(self, expected: Sequence[Array], outputs: Sequence[Array]) -> dict[str, float]:
        """Compute `value`, the largest error of a number, in standard deviations of this number over all probes (at
        least a hundredth of its size); `scale`: the distance of the best common factor from 1, in these deviations.
        """
        wanted, given = (each[0].astype(np.float64) for each in (expected, outputs))
        spread = np.maximum(wanted.std(0), LEAST_SPREAD * np.sqrt((wanted**2).mean(0)))
        wanted, given = divided(wanted, spread), divided(given, spread)
        return {"value": float(np.abs(wanted - given).max()), "scale": scale_error(wanted, given)}
