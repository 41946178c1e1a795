"""Masks: an instance's entry has its outlines, or its mask in the form asked for.

Owns: this task, and the bounds on the cost of an image's masks. Must not know networks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from models.contract.model import Array, Options, OutputSpec
from models.contract.resize import Fit
from models.tasks.detect import LIMITS_WITH_EXTRAS, Detect, Found
from models.tasks.instances import MaskGrid, combined, mask_reduction, polygons_of
from models.tasks.mask_forms import written

_POINTS = 50_000  # For all polygons of an image; each may have at least _LEAST_POINTS.
_LEAST_POINTS = 200
_MASK_PIXELS = 64_000_000


class Segment(Detect):
    """Masks: adds `coefficients` [k, m] and `prototypes` float32 [m, h, w], which are combined into masks."""

    takes = "masks"
    extras = ("coefficients", "prototypes")
    limits = LIMITS_WITH_EXTRAS

    def kept_extras(self, others: Sequence[Array], chosen: Array) -> list[Array]:
        """Keep only the prototypes that the candidates use: they are megabytes."""
        coefficients, prototypes = others
        coefficients = coefficients[chosen]
        used = coefficients.any(axis=0)  # If prototypes are the masks, those of other candidates are unused.
        return [coefficients[:, used], np.asarray(prototypes[used], np.float32)]

    def compared_extras(self, extras: Sequence[Array], places: tuple[Array, Array]) -> list[Array]:
        """Return the masks for networks with their own suppression, which may number their prototypes otherwise."""
        if not self.file.suppressed:
            return super().compared_extras(extras, places)
        (images, rows), (coefficients, prototypes) = places, extras
        return [combined(coefficients[each, rows[images == each]], prototypes[each]) for each in np.unique(images)]

    def locate(self, outputs: Sequence[Array], kept: Array, fit: Fit) -> Found:
        """Return boxes, and the parts of masks."""
        return {**super().locate(outputs, kept, fit), "coefficients": outputs[3][kept], "prototypes": outputs[4]}

    def describe(self, found: Found, fit: Fit, options: Options) -> Sequence[Mapping[str, Any] | None]:
        """Return `segments` or `mask`. None for an empty mask: that is no instance, here and in the reference.

        All masks together have at most `_MASK_PIXELS`: the instances after that have none.
        """
        if options.masks == "none":
            return super().describe(found, fit, options)
        if options.masks == "polygon":
            return [None if rings is None else {"segments": rings} for rings in polygons(found, fit)]
        sides = np.maximum(0, np.ceil(found["boxes"][:, 2:]) - np.ceil(found["boxes"][:, :2]))
        within = int((sides.prod(axis=1).cumsum() <= _MASK_PIXELS).sum())
        first = {name: found[name][:within] for name in ("scores", "coefficients", "boxes")}
        parts = _within_boxes({**first, "prototypes": found["prototypes"]}, fit, 1.0)
        size = fit.placement.width, fit.placement.height
        masks = [mask and {"mask": mask} for mask in written(options.masks, parts, *size)]
        return [*masks, *({"mask": None} for _ in found["scores"][within:])]

    @property
    def answers(self) -> tuple[OutputSpec, ...]:
        """Detection's tensors, and `masks` in a quarter of the input."""
        height, width = (side // 4 for side in self.file.size)
        return *super().answers, OutputSpec("masks", "UINT8", (-1, -1, height, width))

    def extra_tensors(self, found: Found, boxes: Array) -> dict[str, Array]:
        """Return masks uint8 [k, h/4, w/4] in the network's resolution, cut at their boxes."""
        height, width = (side // 4 for side in self.file.size)
        prototypes = found["prototypes"]
        masks = np.zeros((len(found["scores"]), height, width), np.uint8)
        if len(masks) and prototypes.shape[1:] == (height, width):
            for number, (x1, y1, x2, y2) in enumerate(np.ceil(boxes / 4).clip(0, (width, height) * 2).astype(int)):
                one = found["coefficients"][number : number + 1]
                masks[number, y1:y2, x1:x2] = combined(one, prototypes[:, y1:y2, x1:x2])[0] > 0
        return {"masks": masks}

    def moved(self, entry: Mapping[str, Any], x: int, y: int) -> dict[str, Any]:
        """Move an entry with its outlines."""
        moved = super().moved(entry, x, y)
        if "segments" in moved:  # Masks may not have been asked for.
            moved["segments"] = [[[px + x, py + y] for px, py in ring] for ring in entry["segments"]]
        return moved


def grid(prototypes: Array, fit: Fit, factor: float = 1.0) -> MaskGrid:
    """Return the position of prototypes [m, h, w] in an image reduced by `factor`."""
    size = np.array([fit.placement.width, fit.placement.height])
    (left, top), (right, bottom) = fit.pad, fit.pad + fit.scale * size
    width, height = (max(1, round(side * factor)) for side in size.tolist())
    ratio = (prototypes.shape[2] / fit.size[1], prototypes.shape[1] / fit.size[0])
    return MaskGrid.of(ratio, (float(left), float(top), float(right), float(bottom)), (width, height))


def polygons(found: Found, fit: Fit) -> list[list[list[list[float]]] | None]:
    """Return each instance's rings of points in pixels of the image; None for an empty mask."""
    most = max(_LEAST_POINTS, _POINTS // max(1, len(found["scores"])))
    factor = mask_reduction(fit.placement.width, fit.placement.height)
    outlines: list[list[list[list[float]]] | None] = []
    for mask, x, y in _within_boxes(found, fit, factor):
        rings = polygons_of(mask, x, y, most) if mask.size else None
        if rings is None:
            outlines.append(None)
            continue
        whole = factor == 1  # Then the points are pixels.
        outlines.append([(ring if whole else (ring / factor).round(1)).tolist() for ring in rings])
    return outlines


def _within_boxes(found: Mapping[str, Array], fit: Fit, factor: float) -> Iterator[tuple[Array, int, int]]:
    """Yield each instance's mask within its box, and its first pixel, in an image reduced by `factor`."""
    if len(found["scores"]):
        masks = grid(found["prototypes"], fit, factor)
        yield from masks.masks(found["coefficients"], found["prototypes"], found["boxes"] * factor)
