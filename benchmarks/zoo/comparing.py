"""Compares what the command answered with what the library answers. Owns: what still counts as the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.zoo.networks import Floats, Kind


@dataclass(frozen=True)
class Limits:
    """Limits of rounding: in float32, and in the default of a device behind the precision gate."""

    score: float
    pixels: float
    lost: float
    """Share of boxes without a counterpart."""
    cosine: float
    classes: float
    """Share of a map's pixels with another class."""
    depth: float
    """Share of the range of a depth map, or of the largest value."""


FLOAT32 = Limits(score=1e-3, pixels=1.0, lost=0.0, cosine=1e-6, classes=1e-3, depth=1e-3)
DEFAULT = Limits(score=0.1, pixels=6.0, lost=0.1, cosine=1e-2, classes=0.05, depth=0.1)


@dataclass
class Difference:
    """The largest difference of all pictures, in words, and whether it is rounding."""

    words: str
    same: bool


def compare(kind: Kind, theirs: Sequence[Floats], ours: Sequence[Floats], limits: Limits) -> Difference:
    """Compare the pictures' answers one by one."""
    if kind == "boxes":
        return _all_boxes(theirs, ours, limits)
    each = [_ONE[kind](a, b) for a, b in zip(theirs, ours, strict=True)]
    worst = np.array(each, np.float64).max(axis=0)
    if kind == "scores":
        return Difference(f"{worst[0]:.1e}" + (", another first class" if worst[1] > 2 * limits.score else ""),
                          bool(worst[0] <= limits.score and worst[1] <= 2 * limits.score))  # fmt: skip
    limit = {"vector": limits.cosine, "class_map": limits.classes, "depth": limits.depth, "values": limits.depth}[kind]
    form = {"vector": "1 - cosine {:.1e}", "class_map": "{:.2%} of pixels", "depth": "{:.1e} of the range",
            "values": "{:.1e} of the largest"}[kind]  # fmt: skip
    return Difference(form.format(worst[0]), bool(worst[0] <= limit))


def _scores(theirs: Floats, ours: Floats) -> tuple[float, float]:
    """Return the largest difference, and by how much the library's first class leads the command's."""
    if len(ours) > len(theirs):
        return 9.0, 9.0
    known = ~np.isnan(ours)
    difference = float(np.abs(theirs[: len(ours)][known] - ours[known]).max())
    return difference, float(theirs.max() - theirs[int(np.nanargmax(ours))])


def _all_boxes(theirs: Sequence[Floats], ours: Sequence[Floats], limits: Limits) -> Difference:
    found = [_boxes(a, b, limits.score) for a, b in zip(theirs, ours, strict=True)]
    count, alone = sum(len(each) for each in theirs), sum(each[0] for each in found)
    pixels, scores = (max(each[part] for each in found) for part in (1, 2))
    same = pixels <= limits.pixels and scores <= limits.score and alone <= limits.lost * count and count >= 3
    return Difference(f"{pixels:.2g} px, {scores:.1e}; {alone} of {count} alone", same)


def _boxes(theirs: Floats, ours: Floats, margin: float) -> tuple[int, float, float]:
    """Return how many have no counterpart, and of the others the largest differences in pixels and scores.

    A box whose score is about the threshold may lack one: it passes in one of the two only.
    """
    free, pixels, scores, alone = [*range(len(ours))], [0.0], [0.0], 0
    for row in theirs:
        near = [(float(np.abs(ours[i, :4] - row[:4]).max()), i) for i in free if ours[i, 5] == row[5]]
        near = [(distance, i) for distance, i in near if distance <= _NEAR and abs(ours[i, 4] - row[4]) <= 0.1]
        if not near:
            alone += int(row[4] > THRESHOLD + margin)
            continue
        distance, i = min(near)
        free.remove(i)
        pixels.append(distance)
        scores.append(abs(float(ours[i, 4] - row[4])))
    alone += sum(int(ours[i, 4] > THRESHOLD + margin) for i in free)
    return alone, max(pixels), max(scores)


_NEAR = 6.0
THRESHOLD = 0.25
"""The least score of a box that is asked for."""


def _vector(theirs: Floats, ours: Floats) -> tuple[float]:
    if theirs.shape != ours.shape:
        return (9.0,)
    return (1 - float(theirs @ ours / (np.linalg.norm(theirs) * np.linalg.norm(ours))),)


def _class_map(theirs: Floats, ours: Floats) -> tuple[float]:
    return (9.0,) if theirs.shape != ours.shape else (float((theirs != ours).mean()),)


def _range(theirs: Floats, ours: Floats) -> tuple[float]:
    if theirs.shape != ours.shape:
        return (9.0,)
    return (float(np.abs(theirs - ours).max() / max(1e-9, float(theirs.max() - theirs.min()))),)


def _values(theirs: Floats, ours: Floats) -> tuple[float]:
    return (9.0,) if theirs.shape != ours.shape else (float(np.abs(theirs - ours).max() / np.abs(theirs).max()),)


_ONE = {
    "scores": _scores,
    "vector": _vector,
    "class_map": _class_map,
    "depth": _range,
    "values": _values,
}
