"""From candidates to instances: non-maximum suppression, turned boxes, masks, polygons.

Owns: arithmetic on NumPy arrays that is the same for every detector. Must not know networks, requests or JSON. All of
it is bounded: by the candidates that are looked at, the instances that are wanted and the pixels of a mask.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import cv2
import numpy as np
import torch

from models.model import Array
from models.vision import torchvision

# OpenCV's own threads would multiply those that decode.
cv2.setNumThreads(1)

MAX_CANDIDATES = 30_000
MAX_TURNED_CANDIDATES = 2_000
"""Turned boxes are compared each with each, 50 times the work of upright ones."""

_FIRST_CANDIDATES = 1_024
_BLOCK = 256
_MASK_SIDE = 1_280
"""Polygons are found in masks of at most this side: prototypes have a quarter of the network's input."""
_TOGETHER = 16
"""Masks whose logits are in memory at once."""
_EPSILON = 1e-7


def suppress(boxes: Array, scores: Array, classes: Array, iou_threshold: float, most: int) -> Array:
    """Indices of the first `most` that greedy suppression within each class keeps, by descending score.

    boxes: float32 [k, 4] as x1, y1, x2, y2, by descending score. What is kept of the best candidates does not depend on
    the others, so these are tried first, and all only when they do not yield `most`.
    """
    count = len(boxes)
    if count == 0 or most <= 0:
        return np.empty(0, np.int64)
    # One call serves all classes: each gets a place of its own, in float64, where moving a box does not round it.
    places = boxes.astype(np.float64) + classes[:, None] * (float(boxes.max() - boxes.min()) + 1)
    looked_at = max(_FIRST_CANDIDATES, 2 * most)
    while True:
        kept: Array = torchvision.ops.nms(
            torch.from_numpy(places[:looked_at]), torch.from_numpy(scores[:looked_at]).double(), iou_threshold
        ).numpy()
        if len(kept) >= most or looked_at >= count:
            return kept[:most]
        looked_at *= 2


def suppress_turned(boxes: Array, angles: Array, classes: Array, iou_threshold: float, most: int) -> Array:
    """As `suppress`, of boxes [k, 4] as centre x, y, width, height and angles [k] in radians, by descending score.

    A box goes when any box of its class with a higher score, kept or not, overlaps it by more than the threshold, in
    ProbIoU (arXiv 2106.06072): as Ultralytics does. At most `MAX_TURNED_CANDIDATES` are looked at.
    """
    boxes, angles, classes = (
        boxes[:MAX_TURNED_CANDIDATES],
        angles[:MAX_TURNED_CANDIDATES],
        classes[:MAX_TURNED_CANDIDATES],
    )
    kept: list[int] = []
    for first in range(0, len(boxes), _BLOCK):
        stop = min(first + _BLOCK, len(boxes))
        overlaps = probabilistic_iou(boxes[first:stop], angles[first:stop], boxes[:stop], angles[:stop])
        same = classes[first:stop, None] == classes[None, :stop]
        earlier = np.arange(stop)[None, :] < np.arange(first, stop)[:, None]
        gone = ((overlaps > iou_threshold) & same & earlier).any(axis=1)
        kept += (first + np.flatnonzero(~gone)).tolist()
        if len(kept) >= most:
            break
    return np.array(kept[: max(0, most)], np.int64)


def probabilistic_iou(boxes: Array, angles: Array, others: Array, other_angles: Array) -> Array:
    """ProbIoU of every box with every other: float64 [k, m]."""
    one, two = _covariance(boxes, angles), _covariance(others, other_angles)
    a1, b1, c1 = (each[:, None] for each in one)
    a2, b2, c2 = (each[None, :] for each in two)
    x = boxes[:, None, 0].astype(np.float64) - others[None, :, 0]
    y = boxes[:, None, 1].astype(np.float64) - others[None, :, 1]
    a, b, c = a1 + a2, b1 + b2, c1 + c2
    determinant = a * b - c**2
    first = (a * y**2 + b * x**2) / (determinant + _EPSILON) / 4
    second = c * -x * y / (determinant + _EPSILON) / 2
    areas = np.sqrt((a1 * b1 - c1**2).clip(0) * (a2 * b2 - c2**2).clip(0))
    third = np.log(determinant / (4 * areas + _EPSILON) + _EPSILON) / 2
    distance = (first + second + third).clip(_EPSILON, 100)
    found: Array = 1 - np.sqrt(1 - np.exp(-distance) + _EPSILON)
    return found


def _covariance(boxes: Array, angles: Array) -> tuple[Array, Array, Array]:
    width, height = (boxes[:, axis].astype(np.float64) ** 2 / 12 for axis in (2, 3))
    cos, sin = np.cos(angles.astype(np.float64)), np.sin(angles.astype(np.float64))
    return width * cos**2 + height * sin**2, width * sin**2 + height * cos**2, (width - height) * cos * sin


def regular(boxes: Array, angles: Array) -> tuple[Array, Array]:
    """The same turned boxes with the longer side as width and the angle in 0 to pi, as Ultralytics states them."""
    swapped = boxes[:, 2] < boxes[:, 3]
    result = boxes.copy()
    result[:, 2] = np.where(swapped, boxes[:, 3], boxes[:, 2])
    result[:, 3] = np.where(swapped, boxes[:, 2], boxes[:, 3])
    return result, np.where(swapped, angles + np.pi / 2, angles) % np.pi


def corners_of(boxes: Array, angles: Array) -> Array:
    """[k, 4, 2] from centre, width, height and angle: in order around the box."""
    cos, sin = np.cos(angles), np.sin(angles)
    along = np.stack((boxes[:, 2] / 2 * cos, boxes[:, 2] / 2 * sin), axis=1)
    across = np.stack((-boxes[:, 3] / 2 * sin, boxes[:, 3] / 2 * cos), axis=1)
    centre = boxes[:, :2]
    return np.stack(
        (centre + along + across, centre + along - across, centre - along - across, centre - along + across), axis=1
    )


class _Window(NamedTuple):
    """What a box needs of prototypes, each pair for x and y: from `first` to before `last`.

    `shifts` and `enlarged`: where these are enlarged, the place of the first sample and how many there are. `offsets`,
    `steps` and `size`: of the samples that are the image's pixels.
    """

    first: tuple[int, int]
    last: tuple[int, int]
    shifts: tuple[float, float]
    enlarged: tuple[int, int]
    offsets: tuple[float, float]
    steps: tuple[float, float]
    size: tuple[int, int]


@dataclass(frozen=True)
class MaskGrid:
    """Where prototypes lie in an image, each pair for x and y.

    The image fills a rectangle of the network's input; `first` and `last` are its sides in prototypes that are enlarged
    `enlargement` times, and `size` is that of the image. As Ultralytics does, masks are first enlarged so far that the
    rectangle has whole pixels, then cut, then brought to the image's size.
    """

    enlargement: int
    first: tuple[int, int]
    last: tuple[int, int]
    size: tuple[int, int]

    @classmethod
    def of(
        cls, ratio: tuple[float, float], rectangle: tuple[float, float, float, float], size: tuple[int, int]
    ) -> MaskGrid:
        """`ratio`: prototypes for one pixel of the input; `rectangle`: x1, y1, x2, y2 in pixels of the input."""
        places = np.array(rectangle) * np.tile(ratio, 2)
        enlargement = next((each for each in (1, 2) if np.allclose(places * each, (places * each).round())), 4)
        x1, y1, x2, y2 = (round(float(place)) for place in places * enlargement)
        return cls(enlargement, (x1, y1), (max(x1 + 1, x2), max(y1 + 1, y2)), size)

    def masks(self, coefficients: Array, prototypes: Array, boxes: Array) -> Iterator[tuple[Array, int, int]]:
        """Each instance's mask within its box: uint8 [h, w] of 0 and 1, and the x and y of its first pixel.

        coefficients: [k, m]; prototypes: float32 [m, ph, pw]; boxes: [k, 4], x1, y1, x2, y2 in pixels of the image.
        Only the part of the prototypes that a box needs is looked at. Where boxes are large or overlap, that part is
        one for several instances: reading prototypes costs more than multiplying them.
        """
        for first in range(0, len(boxes), _TOGETHER):
            windows = [self._window(box, prototypes.shape) for box in boxes[first : first + _TOGETHER]]
            seen = [each for each in windows if each is not None]
            x1, y1 = (min((each.first[axis] for each in seen), default=0) for axis in (0, 1))
            x2, y2 = (max((each.last[axis] for each in seen), default=0) for axis in (0, 1))
            area = sum((each.last[0] - each.first[0]) * (each.last[1] - each.first[1]) for each in seen)
            together = None
            if area > (x2 - x1) * (y2 - y1):
                together = combined(coefficients[first : first + _TOGETHER], prototypes[:, y1:y2, x1:x2])
            for number, (box, window) in enumerate(zip(boxes[first : first + _TOGETHER], windows, strict=True)):
                if window is None:
                    yield np.zeros((0, 0), np.uint8), *_first_pixel(box)
                    continue
                (left, top), (right, bottom) = window.first, window.last
                if together is not None:
                    logits = together[number, top - y1 : bottom - y1, left - x1 : right - x1]
                else:
                    one = coefficients[first + number : first + number + 1]
                    logits = combined(one, prototypes[:, top:bottom, left:right])[0]
                yield self._mask(logits, window), *_first_pixel(box)

    def _window(self, box: Array, shape: tuple[int, ...]) -> _Window | None:
        """What a box needs of prototypes of this shape; None where it has no pixel."""
        x1, y1, x2, y2 = (int(np.ceil(value)) for value in box)
        if x2 <= x1 or y2 <= y1:
            return None
        firsts: list[int] = []
        lasts: list[int] = []
        offsets, steps, enlarged, parts = [], [], [], []
        for axis, (start, stop) in enumerate(((x1, x2), (y1, y2))):
            step = (self.last[axis] - self.first[axis]) / self.size[axis]
            # Pixel centres: half a pixel lies between their corners and these.
            place = (start + 0.5) * step - 0.5 + self.first[axis]
            low = int(np.clip(np.floor(place) - 1, self.first[axis], self.last[axis] - 1))
            high = int(np.clip(np.ceil(place + (stop - start) * step) + 2, low + 1, self.last[axis]))
            length = shape[2 - axis]
            least = int(np.clip(low // self.enlargement - 1, 0, length - 1))
            greatest = int(np.clip(high // self.enlargement + 2, least + 1, length))
            firsts.append(least)
            lasts.append(greatest)
            enlarged.append((low, high, least))
            offsets.append(place - low)
            steps.append(step)
            parts.append(stop - start)
        scale = 1 / self.enlargement
        shifts = [(low + 0.5) * scale - 0.5 - least for low, _, least in enlarged]
        if self.enlargement == 1:
            offsets = [offset + low - least for offset, (low, _, least) in zip(offsets, enlarged, strict=True)]
        return _Window(
            (firsts[0], firsts[1]),
            (lasts[0], lasts[1]),
            (shifts[0], shifts[1]),
            (enlarged[0][1] - enlarged[0][0], enlarged[1][1] - enlarged[1][0]),
            (offsets[0], offsets[1]),
            (steps[0], steps[1]),
            (parts[0], parts[1]),
        )

    def _mask(self, logits: Array, window: _Window) -> Array:
        """uint8 [h, w] of 0 and 1, from the logits of the window."""
        if self.enlargement > 1:
            scale = 1 / self.enlargement
            logits = _sampled(logits, (scale, scale), window.shifts, window.enlarged)
        found = _sampled(logits, window.steps, window.offsets, window.size)
        return (found > 0).view(np.uint8)


def combined(coefficients: Array, prototypes: Array) -> Array:
    """Logits of masks: [k, m] and float32 [m, h, w] -> float32 [k, h, w].

    By PyTorch, whose threads the server has set to one: NumPy's BLAS takes every core for a product of this size and
    waits for them busily, which took up to 20 times as long where they were at work.
    """
    # Writable, as PyTorch wants arrays; what comes out of shared memory may not be.
    rows, flat = (np.require(each, np.float32, ("C", "W")) for each in (coefficients, prototypes))
    product = torch.mm(torch.from_numpy(rows), torch.from_numpy(flat.reshape(len(flat), -1)))
    logits: Array = product.numpy().reshape(len(coefficients), *prototypes.shape[1:])
    return logits


def _first_pixel(box: Array) -> tuple[int, int]:
    return int(np.ceil(box[0])), int(np.ceil(box[1]))


def _sampled(values: Array, step: tuple[float, float], offset: tuple[float, float], size: tuple[int, int]) -> Array:
    """Bilinear samples [h, w] at x * step + offset, beyond the edge those of the edge."""
    factors = [round(1 / each) for each in step]
    # Where each value becomes a whole number of samples, enlarging all of them is seven times as fast, and the same.
    shifts = [(place + 0.5) * factor - 0.5 for place, factor in zip(offset, factors, strict=True)]
    first_x, first_y = (round(shift) for shift in shifts)
    enlarged = values.shape[1] * factors[0], values.shape[0] * factors[1]
    if (
        max(abs(each * factor - 1) for each, factor in zip(step, factors, strict=True)) < 1e-9
        and max(abs(shifts[0] - first_x), abs(shifts[1] - first_y)) < 1e-6
        and 0 <= first_x <= enlarged[0] - size[0]
        and 0 <= first_y <= enlarged[1] - size[1]
    ):
        whole: Array = cv2.resize(np.ascontiguousarray(values), enlarged, interpolation=cv2.INTER_LINEAR)
        return whole[first_y : first_y + size[1], first_x : first_x + size[0]]
    matrix = np.array([[step[0], 0, offset[0]], [0, step[1], offset[1]]], np.float64)
    flags = cv2.INTER_LINEAR | cv2.WARP_INVERSE_MAP
    source = np.ascontiguousarray(values)
    sampled: Array = cv2.warpAffine(source, matrix, size, flags=flags, borderMode=cv2.BORDER_REPLICATE)
    return sampled


def polygons_of(mask: Array, x: int, y: int, most: int) -> list[Array]:
    """The outer contours of a mask whose first pixel is at (x, y): rings, int32 [points, 2], the largest first.

    Holes are left out, and so are the smallest rings, and single points of the others, beyond `most` points in all.
    """
    contours, _ = cv2.findContours(mask, cv2.RETR_EXTERNAL, cv2.CHAIN_APPROX_SIMPLE)
    rings: list[Array] = []
    for contour in sorted(contours, key=len, reverse=True):
        ring = contour[:: -(-len(contour) // max(1, most))]
        if len(ring) < 3:
            break
        most -= len(ring)
        rings.append(ring.reshape(-1, 2) + np.array((x, y), np.int32))
    return rings


def mask_reduction(width: int, height: int) -> float:
    """By how much an image is reduced for its masks, at most 1."""
    return min(1.0, _MASK_SIDE / max(width, height))
