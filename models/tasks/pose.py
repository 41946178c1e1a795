"""Poses: the entry of an instance has its key points.

Owns: this task. Must not know networks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np

from models.contract.model import Array, Options, OutputSpec
from models.tasks.detect import Fit, Found, InstanceTask


class Pose(InstanceTask):
    """Adds `keypoints` float64 [k, points, 3]: x and y in pixels of the image, and a score, 1 where there is none."""

    name = "pose"
    outputs = ("keypoints",)

    @classmethod
    def columns(cls, keypoints: tuple[int, int] | None, prototypes: Sequence[int]) -> int:
        """Every value of every key point."""
        if keypoints is None:
            raise ValueError('a network of poses needs "keypoints": [17, 3] in its sidecar')
        return prod(keypoints)

    def locate(self, outputs: Sequence[Array], kept: Array, frame: Fit) -> Found:
        """Boxes and key points."""
        assert self.keypoints is not None
        points = outputs[3][kept].astype(np.float64).reshape(len(kept), *self.keypoints)
        visible = points[..., 2:3] if points.shape[2] > 2 else np.ones((*points.shape[:2], 1))
        found = super().locate(outputs, kept, frame)
        return {**found, "keypoints": np.concatenate((frame.points(points[..., :2]), visible), axis=2)}

    def describe(self, found: Found, frame: Fit, options: Options) -> Sequence[Mapping[str, Any] | None]:
        """`keypoints`."""
        return [
            {"keypoints": [{"x": round(x, 2), "y": round(y, 2), "score": round(score, 5)} for x, y, score in points]}
            for points in found["keypoints"].tolist()
        ]

    def specs(self, size: tuple[int, int]) -> tuple[OutputSpec, ...]:
        """`keypoints`."""
        assert self.keypoints is not None
        return (OutputSpec("keypoints", "FP32", (-1, -1, self.keypoints[0], 3)),)

    def tensors(self, found: Found, boxes: Array, size: tuple[int, int]) -> dict[str, Array]:
        """As `specs`."""
        return {"keypoints": found["keypoints"].astype(np.float32)}
