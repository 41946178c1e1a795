"""The task `text-direction`: tells whether a line of text is upside down."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import cv2
import numpy as np

from anychip_ocr.quadrilaterals import lines, place_line
from models.contract.measures import Limits
from models.contract.model import Array, Options, Placement
from models.contract.task_adapter import AdaptedFile, TaskAdapter

_LIMITS: Limits = {"fp32": {"score": 0.002}, "fp16": {"score": 0.01}, "bf16": {"score": 0.03}}


class TextDirection(TaskAdapter):
    """A network with one output [n, 2]: probabilities of 0 and of 180 degrees."""

    limits = _LIMITS

    def __init__(self, file: AdaptedFile) -> None:
        super().__init__(file)
        if file.shapes != ((1, 2),):
            raise ValueError(f"a network of directions has one output [n, 2], not {file.shapes}")
        self.sure = float(file.option("sure", 0.9))
        self.stretch = bool(file.option("stretch", False))

    def probes(self) -> Sequence[Array]:
        """Draw lines of text, and the same lines upside down."""
        upright = lines()
        return [*upright, *(line[::-1, ::-1] for line in upright)]

    def measures(self, expected: Sequence[Array], outputs: Sequence[Array]) -> dict[str, float]:
        """Compute `score`: the largest error of a probability."""
        return {"score": float(np.abs(expected[0].astype(np.float64) - outputs[0]).max())}

    def place(self, image: Array, out: Array, width: int, height: int) -> Placement:
        """Place the line from the left on, as high as the input, in BGR; or stretched over all of it, in RGB."""
        if self.stretch:
            out[...] = cv2.resize(np.ascontiguousarray(image), out.shape[1::-1])
        else:
            place_line(image, out)
        return Placement(width, height)

    def postprocess(self, outputs: Sequence[Array], placement: Placement, options: Options) -> Mapping[str, Any]:
        """Return `turned`, True only if the network is sure, and `score`."""
        score = float(outputs[0][1])
        return {"turned": score > self.sure, "score": round(score, 5)}
