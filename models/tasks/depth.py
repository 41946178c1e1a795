"""Depth: a number for each place of an image, in the network's resolution.

Owns: this task and the answer's form. Must not know networks, nor what a number means: metres, or the inverse (some
networks answer with it).
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from models.contract.model import Array, Options, OutputSpec, Placement
from models.contract.task_adapter import AdaptedFile, TaskAdapter
from models.tasks.mask_forms import grey_png

if TYPE_CHECKING:
    from torch import Tensor

_GREATEST = 65_535  # Largest number of 16 bits.


class DepthEstimation(TaskAdapter):
    """Depth from the first output, [n, h, w] or [n, 1, h, w]."""

    resize = "stretch"
    known_options = ()
    outputs = ("depth",)
    """`depth`, [n, h, w]."""

    def __init__(self, file: AdaptedFile) -> None:
        """Raise ValueError if the first output is no map."""
        super().__init__(file)
        shape = file.shapes[0]
        if len(shape) not in (3, 4) or shape[1:-2] not in ((), (1,)):
            raise ValueError(f"a network of depth has an output [n, h, w] or [n, 1, h, w], not {list(shape)}")
        self.height, self.width = shape[-2:]

    def compute(self, outputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the map, float32 [n, h, w]."""
        return (outputs[0].float().reshape(-1, self.height, self.width),)

    def postprocess(self, outputs: Sequence[Array], placement: Placement, options: Options) -> dict[str, Any]:
        """Return `depth`: the size of the map of the image, its range, and the map as PNG or base64 of float32."""
        seen = self.file.resize.fit(placement).seen(outputs[0])
        low, high = float(seen.min()), float(seen.max())
        if options.encoding == "base64":
            form = {"float32": base64.b64encode(seen.astype("<f4").tobytes()).decode("ascii")}
        else:
            step = (high - low) / _GREATEST
            levels = ((seen - np.float64(low)) / (step or 1)).round().clip(0, _GREATEST)
            form = {"png": grey_png(levels.astype(np.uint16))}
        return {"depth": {"size": list(seen.shape), "min": low, "max": high, **form}}

    @property
    def answers(self) -> tuple[OutputSpec, ...]:
        """The whole map, with the input's padding beside the image."""
        return (OutputSpec("depth", "FP32", (-1, self.height, self.width)),)

    def tensors(self, outputs: Sequence[Array], placement: Placement, options: Options) -> dict[str, Array]:
        """Return `depth`, float32 [h, w]."""
        return {"depth": outputs[0]}
