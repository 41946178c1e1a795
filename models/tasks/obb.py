"""Turned boxes: an instance's entry has its centre, sides, angle and corners.

Owns: this task. Must not know networks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from models.contract.model import Array, Options, OutputSpec
from models.contract.resize import Fit
from models.tasks.detect import LIMITS_WITH_EXTRAS, Detect, Found
from models.tasks.instances import corners_of, regular, suppress_turned


class TurnedBoxes(Detect):
    """Turned boxes: adds `turned` float64 [k, 5] and `corners` [k, 4, 2]; `boxes` are the upright ones around them."""

    takes = "turned"
    extras = ("angles",)
    limits = LIMITS_WITH_EXTRAS

    def keep(self, outputs: Sequence[Array], options: Options) -> Array:
        """Suppress by ProbIoU, Ultralytics' overlap of turned boxes."""
        boxes, _, classes, angles = outputs[:4]
        return suppress_turned(boxes, angles[:, 0], classes, options.iou_threshold, options.max_detections)

    def locate(self, outputs: Sequence[Array], kept: Array, fit: Fit) -> Found:
        """Return turned boxes with the longer side as width, in pixels of the image."""
        boxes, angles = regular(outputs[0][kept].astype(np.float64), outputs[3][kept, 0].astype(np.float64))
        boxes = (boxes - np.concatenate((fit.pad, np.zeros(2)))) / np.tile(fit.scale, 2)
        corners = corners_of(boxes, angles)
        limit = [fit.placement.width, fit.placement.height] * 2
        return {
            "turned": np.concatenate((boxes, angles[:, None]), axis=1),
            "corners": corners,
            "boxes": np.concatenate((corners.min(axis=1), corners.max(axis=1)), axis=1).clip(0, limit),
        }

    def describe(self, found: Found, fit: Fit, options: Options) -> Sequence[Mapping[str, Any] | None]:
        """Return `obb` and `corners`."""
        names = ("cx", "cy", "w", "h", "angle")
        turned = np.concatenate((found["turned"][:, :4].round(2), found["turned"][:, 4:].round(5)), axis=1)
        return [
            {"obb": dict(zip(names, box, strict=True)), "corners": corners}
            for box, corners in zip(turned.tolist(), found["corners"].round(2).tolist(), strict=True)
        ]

    @property
    def answers(self) -> tuple[OutputSpec, ...]:
        """Detection's tensors, `turned` (centre x and y, width, height, angle), and `corners` around the box."""
        turned = OutputSpec("turned", "FP32", (-1, -1, 5)), OutputSpec("corners", "FP32", (-1, -1, 4, 2))
        return *super().answers, *turned

    def extra_tensors(self, found: Found, boxes: Array) -> dict[str, Array]:
        """Return `turned` and `corners`."""
        return {name: found[name].astype(np.float32) for name in ("turned", "corners")}

    def moved(self, entry: Mapping[str, Any], x: int, y: int) -> dict[str, Any]:
        """Move an entry with its centre and corners."""
        obb = {**entry["obb"], "cx": entry["obb"]["cx"] + x, "cy": entry["obb"]["cy"] + y}
        corners = [[px + x, py + y] for px, py in entry["corners"]]
        return {**super().moved(entry, x, y), "obb": obb, "corners": corners}
