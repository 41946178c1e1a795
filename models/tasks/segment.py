"""Masks: the entry of an instance has its outlines, or its mask in the form that was asked for.

Owns: this task, and the bounds on what the masks of an image cost. Must not know networks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from models.contract.model import Array, Options, OutputSpec
from models.tasks.detect import Fit, Found, InstanceTask
from models.tasks.instances import MaskGrid, combined, mask_reduction, polygons_of
from models.tasks.mask_forms import written

_POINTS = 50_000  # Of all polygons of an image, but each may have the least.
_LEAST_POINTS = 200
_MASK_PIXELS = 64_000_000


class Segment(InstanceTask):
    """Adds `coefficients` [k, m] and `prototypes` float32 [m, h, w], of which masks are made."""

    name = "segment"
    outputs = ("coefficients", "prototypes")
    has_prototypes = True

    @classmethod
    def columns(cls, keypoints: tuple[int, int] | None, prototypes: Sequence[int]) -> int:
        """A coefficient for each prototype."""
        return prototypes[1]

    def reduce(self, others: Sequence[Array], chosen: Array) -> list[Array]:
        """Prototypes only where there is an instance: they are megabytes."""
        prototypes = others[-1] if len(chosen) else others[-1][:0]
        return [*super().reduce(others, chosen), np.array(prototypes, np.float32)]

    def locate(self, outputs: Sequence[Array], kept: Array, frame: Fit) -> Found:
        """Boxes, and what masks are made of."""
        return {**super().locate(outputs, kept, frame), "coefficients": outputs[3][kept], "prototypes": outputs[4]}

    def describe(self, found: Found, frame: Fit, options: Options) -> Sequence[Mapping[str, Any] | None]:
        """`segments` or `mask`. None where the mask is empty: as the reference does, that is no instance.

        Of all masks together at most `_MASK_PIXELS` are looked at: the instances after that have none.
        """
        if options.masks == "none":
            return super().describe(found, frame, options)
        if options.masks == "polygon":
            return [None if rings is None else {"segments": rings} for rings in polygons(found, frame)]
        sides = np.maximum(0, np.ceil(found["boxes"][:, 2:]) - np.ceil(found["boxes"][:, :2]))
        within = int((sides.prod(axis=1).cumsum() <= _MASK_PIXELS).sum())
        first = {name: found[name][:within] for name in ("scores", "coefficients", "boxes")}
        parts = _within_boxes({**first, "prototypes": found["prototypes"]}, frame, 1.0)
        size = frame.placement.width, frame.placement.height
        masks = [mask and {"mask": mask} for mask in written(options.masks, parts, *size)]
        return [*masks, *({"mask": None} for _ in found["scores"][within:])]

    def specs(self, size: tuple[int, int]) -> tuple[OutputSpec, ...]:
        """`masks`, in a quarter of the input."""
        return (OutputSpec("masks", "UINT8", (-1, -1, size[0] // 4, size[1] // 4)),)

    def tensors(self, found: Found, boxes: Array, size: tuple[int, int]) -> dict[str, Array]:
        """uint8 [k, h/4, w/4]: the masks as the network sees them, cut at their boxes."""
        height, width = (side // 4 for side in size)
        prototypes = found["prototypes"]
        masks = np.zeros((len(found["scores"]), height, width), np.uint8)
        if len(masks) and prototypes.shape[1:] == (height, width):
            for number, (x1, y1, x2, y2) in enumerate(np.ceil(boxes / 4).clip(0, (width, height) * 2).astype(int)):
                one = found["coefficients"][number : number + 1]
                masks[number, y1:y2, x1:x2] = combined(one, prototypes[:, y1:y2, x1:x2])[0] > 0
        return {"masks": masks}


def grid(prototypes: Array, frame: Fit, factor: float = 1.0) -> MaskGrid:
    """Where prototypes [m, h, w] lie in an image reduced by `factor`."""
    size = np.array([frame.placement.width, frame.placement.height])
    (left, top), (right, bottom) = frame.pad, frame.pad + frame.scale * size
    width, height = (max(1, round(side * factor)) for side in size.tolist())
    ratio = (prototypes.shape[2] / frame.size[1], prototypes.shape[1] / frame.size[0])
    return MaskGrid.of(ratio, (float(left), float(top), float(right), float(bottom)), (width, height))


def polygons(found: Found, frame: Fit) -> list[list[list[list[float]]] | None]:
    """Each instance's rings of points in pixels of the image; None where its mask is empty."""
    most = max(_LEAST_POINTS, _POINTS // max(1, len(found["scores"])))
    factor = mask_reduction(frame.placement.width, frame.placement.height)
    outlines: list[list[list[list[float]]] | None] = []
    for mask, x, y in _within_boxes(found, frame, factor):
        rings = polygons_of(mask, x, y, most) if mask.size else None
        if rings is None:
            outlines.append(None)
            continue
        whole = factor == 1  # Then the points are pixels.
        outlines.append([(ring if whole else (ring / factor).round(1)).tolist() for ring in rings])
    return outlines


def _within_boxes(found: Mapping[str, Array], frame: Fit, factor: float) -> Iterator[tuple[Array, int, int]]:
    """Each instance's mask within its box, and its first pixel, in an image reduced by `factor`."""
    if len(found["scores"]):
        masks = grid(found["prototypes"], frame, factor)
        yield from masks.masks(found["coefficients"], found["prototypes"], found["boxes"] * factor)
