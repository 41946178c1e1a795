"""Poses: an instance's entry has its key points.

Owns: this task. Must not know networks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from models.contract.model import Array, Options, OutputSpec
from models.contract.resize import Fit
from models.contract.task_adapter import AdaptedFile
from models.tasks.detect import LIMITS_WITH_EXTRAS, Detect, Found


class Pose(Detect):
    """Poses: adds `keypoints` float64 [k, points, 3]: x and y in pixels of the image, and a score, 1 by default."""

    takes = "keypoints"
    extras = ("keypoints",)
    limits = LIMITS_WITH_EXTRAS

    def __init__(self, file: AdaptedFile) -> None:
        """Read the option `keypoints`: their number, and the values of each. Raises ValueError if it is missing."""
        super().__init__(file)
        number, values = file.option("keypoints") or (0, 0)
        if not number:
            raise ValueError('a network of poses needs "keypoints": [17, 3] in its sidecar')
        self.keypoints: tuple[int, int] = number, values

    def locate(self, outputs: Sequence[Array], kept: Array, fit: Fit) -> Found:
        """Return boxes and key points."""
        points = outputs[3][kept].astype(np.float64).reshape(len(kept), *self.keypoints)
        visible = points[..., 2:3] if points.shape[2] > 2 else np.ones((*points.shape[:2], 1))
        found = super().locate(outputs, kept, fit)
        return {**found, "keypoints": np.concatenate((fit.points(points[..., :2]), visible), axis=2)}

    def describe(self, found: Found, fit: Fit, options: Options) -> Sequence[Mapping[str, Any] | None]:
        """Return `keypoints`."""
        return [
            {"keypoints": [{"x": round(x, 2), "y": round(y, 2), "score": round(score, 5)} for x, y, score in points]}
            for points in found["keypoints"].tolist()
        ]

    @property
    def answers(self) -> tuple[OutputSpec, ...]:
        """Detection's tensors, and `keypoints`: x, y and score of each."""
        return *super().answers, OutputSpec("keypoints", "FP32", (-1, -1, self.keypoints[0], 3))

    def extra_tensors(self, found: Found, boxes: Array) -> dict[str, Array]:
        """Return `keypoints`."""
        return {"keypoints": found["keypoints"].astype(np.float32)}

    def moved(self, entry: Mapping[str, Any], x: int, y: int) -> dict[str, Any]:
        """Move an entry with its key points."""
        points = [{**point, "x": point["x"] + x, "y": point["y"] + y} for point in entry["keypoints"]]
        return {**super().moved(entry, x, y), "keypoints": points}
