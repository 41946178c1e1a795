"""A large image in tiles: their positions, and one answer, suppressed across seams. Must not know requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from models.contract.model import Array, Options
from models.contract.task_adapter import TaskAdapter

_WITHIN = 0.6
"""Share of the smaller of two boxes from different tiles; beyond it the smaller one is a part of the same object."""
_MOST = 5_000
"""Instances of all tiles that are compared."""


@dataclass(frozen=True, slots=True)
class Tiling:
    """Tiles of an image. `side`: of a tile, in pixels, 0: none; `overlap`: share of it common to neighbours."""

    side: int
    overlap: float

    def tiles(self, width: int, height: int) -> list[tuple[int, int, int, int]]:
        """Return x, y, width and height of each tile, row by row; the image itself if it fits into one."""
        return [
            (x, y, min(self.side, width), min(self.side, height))
            for y in self._starts(height)
            for x in self._starts(width)
        ]

    def _starts(self, length: int) -> list[int]:
        last = max(0, length - self.side)
        step = max(1, int(self.side * (1 - self.overlap)))
        return [*range(0, last, step), last]


def merged(
    task: TaskAdapter, parts: Sequence[tuple[Mapping[str, Any], int, int]], width: int, height: int, options: Options
) -> dict[str, Any]:
    """Merge the predictions of an image's tiles, each with the tile's first pixel (x, y).

    Of overlapping boxes of a class the one with the best score stays. Others go if their IoU with it exceeds
    `options.iou_threshold`, or, from another tile, if the overlap covers most of the smaller box.
    """
    found = [
        (task.moved(instance, x, y), number)
        for number, (part, x, y) in enumerate(parts)
        for instance in part["detections"]
    ]
    found.sort(key=lambda each: -each[0]["score"])
    found = found[:_MOST]
    boxes = np.array([[*instance["box"].values()] for instance, _ in found], np.float64).reshape(-1, 4)
    classes = np.array([instance["class_id"] for instance, _ in found], np.int64)
    tiles = np.array([number for _, number in found], np.int64)
    kept = _kept(boxes, classes, tiles, options)
    return {"detections": [found[index][0] for index in kept], "width": width, "height": height}


def _kept(boxes: Array, classes: Array, tiles: Array, options: Options) -> list[int]:
    areas = (boxes[:, 2:] - boxes[:, :2]).prod(axis=1)
    stands = np.ones(len(boxes), bool)
    kept: list[int] = []
    for index in range(len(boxes)):
        if not stands[index]:
            continue
        if len(kept) >= options.max_detections:
            break
        kept.append(index)
        rest = slice(index + 1, None)
        corner = np.minimum(boxes[index, 2:], boxes[rest, 2:]) - np.maximum(boxes[index, :2], boxes[rest, :2])
        common = corner.clip(0).prod(axis=1)
        same = common > options.iou_threshold * (areas[index] + areas[rest] - common)
        part = (tiles[rest] != tiles[index]) & (common > _WITHIN * np.minimum(areas[index], areas[rest]))
        stands[rest] &= (classes[rest] != classes[index]) | ~(same | part)
    return kept
