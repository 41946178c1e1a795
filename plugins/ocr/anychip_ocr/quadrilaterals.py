"""Quadrilaterals around lines of text: from a map of probabilities, in reading order, and cut out of the image.

A quadrilateral is float32 [4, 2], points as x and y: upper left, upper right, lower right, lower left of the line.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import cv2
import numpy as np

from models.contract.cascade import Region
from models.contract.model import Array

GREY = 127
"""Level outside the image, closest to 0 after normalisation."""
_LEAST_SIDE = 3.0  # For a box in the map; two more after its expansion.
_LEAST_PIXELS = 3  # For a side in the image: a quadrilateral must have more.
_SAME_LINE_PIXELS = 10
_UPRIGHT_RATIO = 1.5


@dataclass(frozen=True)
class Thresholds:
    """Thresholds that turn a map of probabilities into quadrilaterals.

    `pixel`: least probability of a pixel of text; `box`: least mean probability within a box; `unclip`: expansion of a
    box, as a factor of area / perimeter (DB's paper); `most`: greatest number of boxes; `dilate`: whether the area of
    text grows by a pixel to the right and downwards.
    """

    pixel: float = 0.3
    box: float = 0.5
    unclip: float = 1.6
    most: int = 1000
    dilate: bool = True


def found_in(probabilities: Array, limits: Thresholds) -> tuple[Array, Array]:
    """Find quadrilaterals float32 [k, 4, 2] in pixels of the map [h, w], and their scores float32 [k].

    Differentiable Binarization (arXiv:1911.08947): networks are trained on text that is shrunk by Vatti's clipping, so
    the boxes are expanded by area * `unclip` / perimeter. Round corners of an expanded rectangle do not change the
    smallest rectangle around it: it has that much more on each side.
    """
    mask: Array = (probabilities > limits.pixel).astype(np.uint8)
    if limits.dilate:
        mask = cv2.dilate(mask, np.ones((2, 2), np.uint8))
    contours, _ = cv2.findContours(mask, cv2.RETR_LIST, cv2.CHAIN_APPROX_SIMPLE)
    boxes, scores = [], []
    for contour in contours[: limits.most]:
        centre, (width, height), angle = cv2.minAreaRect(contour)
        if min(width, height) < _LEAST_SIDE:
            continue
        score = _mean_within(probabilities, cv2.boxPoints((centre, (width, height), angle)))
        if score < limits.box:
            continue
        more = width * height * limits.unclip / (width + height)
        if min(width, height) + more < _LEAST_SIDE + 2:
            continue
        boxes.append(ordered(cv2.boxPoints((centre, (width + more, height + more), angle))))
        scores.append(score)
    return np.array(boxes, np.float32).reshape(-1, 4, 2), np.array(scores, np.float32)


def ordered(points: Array) -> Array:
    """Order four points clockwise, the upper left first: each pair, left and right, is ordered by height."""
    left, right = np.split(points[np.argsort(points[:, 0], kind="stable")], 2)
    (upper_left, lower_left), (upper_right, lower_right) = (each[np.argsort(each[:, 1])] for each in (left, right))
    return np.array([upper_left, upper_right, lower_right, lower_left], np.float32)


def in_image(quads: Array, scale: tuple[float, float], width: int, height: int) -> tuple[Array, Array]:
    """Convert quadrilaterals of the map to whole pixels of the image, and tell which are large enough.

    `scale`: pixels of the map for one of the image, across and down.
    """
    points = np.round(quads / np.array(scale, np.float32)).clip(0, (width - 1, height - 1)).astype(np.float32)
    sides = np.linalg.norm(points[:, [1, 3]] - points[:, [0]], axis=2)
    return points, (sides.astype(int) > _LEAST_PIXELS).all(axis=1)


def reading_order(quads: Array) -> Array:
    """Return the order of quadrilaterals: lines from the top, each line from the left, by the upper left points."""
    if not len(quads):
        return np.zeros(0, np.int64)
    left, top = quads[:, 0].T
    down = np.argsort(top, kind="stable")
    line = np.concatenate(([0], np.cumsum(np.diff(top[down]) >= _SAME_LINE_PIXELS)))
    found: Array = down[np.lexsort((left[down], line))]
    return found


def cut_of(quad: Array) -> Region:
    """Return the cut of a quadrilateral; one that is much higher than wide is a line that runs downwards."""
    above, right, below, left = (float(np.linalg.norm(quad[(end + 1) % 4] - quad[end])) for end in range(4))
    width, height = max(1, int(max(above, below))), max(1, int(max(left, right)))
    corners = tuple(float(number) for number in quad.ravel())
    return Region(0, 0, width, height, int(height / width >= _UPRIGHT_RATIO), corners)


def resized_width(ratio: float, height: int, most: int) -> int:
    """Return the width in pixels of a line of this ratio at this height, at most `most`."""
    return max(1, min(most, int(np.ceil(height * ratio))))


def place_line(image: Array, out: Array) -> None:
    """Place a line in a network's input: full height, from the left, the rest grey; BGR."""
    height, most = out.shape[:2]
    width = resized_width(image.shape[1] / image.shape[0], height, most)
    resized = cv2.resize(np.ascontiguousarray(image), (width, height))
    out[:, :width] = resized[..., ::-1]
    out[:, width:] = GREY


def bucket_of(size: int, buckets: Sequence[int]) -> int:
    """Return the smallest of ascending sizes that holds this one, else the greatest."""
    return next((each for each in buckets if size <= each), buckets[-1])


def _mean_within(probabilities: Array, points: Array) -> float:
    height, width = probabilities.shape
    limit = (width - 1, height - 1)
    low, high = (edge.astype(int).clip(0, limit) for edge in (np.floor(points.min(0)), np.ceil(points.max(0))))
    mask = np.zeros((high[1] - low[1] + 1, high[0] - low[0] + 1), np.uint8)
    cv2.fillPoly(mask, [(points - low).astype(np.int32)], 1)
    return float(cv2.mean(probabilities[low[1] : high[1] + 1, low[0] : high[0] + 1], mask)[0])


# --- Images of text for the precision gate, drawn with OpenCV's own strokes: no font is needed

_TEXTS = (
    "Invoice 2031-07",
    "Total 1,482.90",
    "The quick brown fox",
    "over 300 lazy dogs",
    "Berlin / London",
    "No. 55-B (copy)",
    "Reference: QX 7741",
    "Net 30 days",
)
_PAPER, _INK = (244, 246, 250), (40, 30, 25)


def lines() -> Sequence[Array]:
    """Draw one line an image."""
    return [_drawn((44, 22 * len(text)), [(text, (8, 31))]) for text in _TEXTS]


def pages(height: int, width: int) -> Sequence[Array]:
    """Draw two pages that fill an input of this size, with lines in two columns, one of them turned."""
    rows = range(60, height - 40, 70)
    places = [(column, row) for row in rows for column in (40, width // 2)]
    upright = _drawn((height, width), [(_TEXTS[number % len(_TEXTS)], at) for number, at in enumerate(places)])
    turn = cv2.getRotationMatrix2D((width / 2, height / 2), 8, 1)
    return [upright, cv2.warpAffine(upright, turn, (width, height), borderValue=_PAPER)]


def _drawn(size: tuple[int, int], texts: Sequence[tuple[str, tuple[int, int]]]) -> Array:
    image = np.full((*size, 3), _PAPER, np.uint8)
    for text, at in texts:
        cv2.putText(image, text, at, cv2.FONT_HERSHEY_SIMPLEX, 1.0, _INK, 2, cv2.LINE_AA)
    return image
