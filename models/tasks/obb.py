"""Turned boxes: the entry of an instance has its centre, sides, angle and corners.

Owns: this task. Must not know networks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from models.contract.model import Array, Options, OutputSpec
from models.tasks.detect import Fit, Found, InstanceTask
from models.tasks.instances import corners_of, regular, suppress_turned


class TurnedBoxes(InstanceTask):
    """Adds `turned` float64 [k, 5] and `corners` [k, 4, 2]; `boxes` are the upright ones around them."""

    name = "obb"
    outputs = ("angles",)
    turned = True

    @classmethod
    def columns(cls, keypoints: tuple[int, int] | None, prototypes: Sequence[int]) -> int:
        """The angle."""
        return 1

    def keep(self, outputs: Sequence[Array], options: Options) -> Array:
        """As Ultralytics does, by ProbIoU."""
        boxes, _, classes, angles = outputs[:4]
        return suppress_turned(boxes, angles[:, 0], classes, options.iou_threshold, options.max_detections)

    def locate(self, outputs: Sequence[Array], kept: Array, frame: Fit) -> Found:
        """With the longer side as width, in pixels of the image."""
        boxes, angles = regular(outputs[0][kept].astype(np.float64), outputs[3][kept, 0].astype(np.float64))
        boxes = (boxes - np.concatenate((frame.pad, np.zeros(2)))) / np.tile(frame.scale, 2)
        corners = corners_of(boxes, angles)
        limit = [frame.placement.width, frame.placement.height] * 2
        return {
            "turned": np.concatenate((boxes, angles[:, None]), axis=1),
            "corners": corners,
            "boxes": np.concatenate((corners.min(axis=1), corners.max(axis=1)), axis=1).clip(0, limit),
        }

    def describe(self, found: Found, frame: Fit, options: Options) -> Sequence[Mapping[str, Any] | None]:
        """`obb` and `corners`."""
        names = ("cx", "cy", "w", "h", "angle")
        turned = np.concatenate((found["turned"][:, :4].round(2), found["turned"][:, 4:].round(5)), axis=1)
        return [
            {"obb": dict(zip(names, box, strict=True)), "corners": corners}
            for box, corners in zip(turned.tolist(), found["corners"].round(2).tolist(), strict=True)
        ]

    def specs(self, size: tuple[int, int]) -> tuple[OutputSpec, ...]:
        """`turned`: centre x and y, width, height, angle; `corners`: in order around the box."""
        return OutputSpec("turned", "FP32", (-1, -1, 5)), OutputSpec("corners", "FP32", (-1, -1, 4, 2))

    def tensors(self, found: Found, boxes: Array, size: tuple[int, int]) -> dict[str, Array]:
        """As `specs`."""
        return {name: found[name].astype(np.float32) for name in ("turned", "corners")}
