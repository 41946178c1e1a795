"""Turning candidates into instances: non-maximum suppression, turned boxes, masks, and the forms of masks.

Owns: arithmetic on NumPy arrays that is the same for every detector. Must not know networks or requests. All of it is
bounded: by the candidates considered, the instances wanted and the pixels of a mask. A mask of an instance is the part
within its box, so that the cost is that of the box, however large the image is.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import cv2
import numpy as np

from models.contract.model import Array

# OpenCV's own threads would add to the decoders' threads.
cv2.setNumThreads(1)

MAX_CANDIDATES = 30_000
MAX_TURNED_CANDIDATES = 2_000
"""Most turned boxes; each is compared with each, 50 times the work of upright ones."""

_WINDOW, _COMPARED = 512, 48
"""Candidates considered together, and the part of them that is compared each with each."""
_BLOCK = 256
_MASK_SIDE = 1_280
"""Longest side of masks for polygons: prototypes have a quarter of the network's input."""
_TOGETHER = 16
"""Masks with logits in memory at the same time."""
_MOST_OF_A_ROW = 0.7
"""Share from which whole rows are multiplied in place: copying parts of them costs more."""
_ALONE, _LEAST_COLUMNS = 200_000, 16
"""Multiplications that OpenBLAS still computes in one thread, a little less; columns of its kernels."""
_EPSILON = 1e-7

Pair = Sequence[float] | Array


def suppress(boxes: Array, scores: Array, classes: Array, iou_threshold: float, most: int) -> Array:
    """Return the indices of the first `most` that greedy suppression within each class keeps, by descending score.

    boxes: float32 [k, 4] as x1, y1, x2, y2, by descending score. The survivors among the best candidates do not depend
    on the others, so these are tried first, and all only if these do not yield `most`.
    """
    if len(boxes) == 0 or most <= 0:
        return np.empty(0, np.int64)
    # One pass serves all classes: each gets a place of its own, in float64, where moving a box does not round it.
    places = (boxes.astype(np.float64) + classes[:, None] * (float(boxes.max() - boxes.min()) + 1)).T
    kept: list[int] = []
    for first in range(0, len(boxes), _WINDOW):
        left, new = np.arange(first, min(first + _WINDOW, len(boxes))), kept
        while len(left) and len(kept) < most:
            if new:
                left = left[~_overlapping(places[:, left], places[:, new], iou_threshold).any(axis=1)]
            some, left, new = left[:_COMPARED], left[_COMPARED:], []
            upon = _overlapping(places[:, some], places[:, some], iou_threshold)
            gone = np.zeros(len(some), bool)
            for row, number in enumerate(some.tolist()):
                if not gone[row]:
                    new.append(number)
                    gone |= upon[row]
            kept += new
    return np.array(kept[:most], np.int64)


def _overlapping(boxes: Array, others: Array, threshold: float) -> Array:
    """Return, as bool [k, m], which pairs of boxes float64 [4, k] and [4, m] have an IoU over the threshold."""
    (x1, y1, x2, y2), (left, top, right, bottom) = boxes[:, :, None], others[:, None]
    shared = (np.minimum(x2, right) - np.maximum(x1, left)).clip(0)
    shared *= (np.minimum(y2, bottom) - np.maximum(y1, top)).clip(0)
    with np.errstate(divide="ignore", invalid="ignore"):
        found: Array = shared / ((x2 - x1) * (y2 - y1) + (right - left) * (bottom - top) - shared) > threshold
    return found


def suppress_turned(boxes: Array, angles: Array, classes: Array, iou_threshold: float, most: int) -> Array:
    """Suppress turned boxes as `suppress` does: [k, 4] as centre x, y, width, height, and angles [k] in radians, by
    descending score.

    A box goes when any box of its class with a higher score, kept or not, overlaps it by more than the threshold, in
    ProbIoU (arXiv 2106.06072), which Ultralytics uses. At most `MAX_TURNED_CANDIDATES` are considered.
    """
    boxes, angles, classes = (each[:MAX_TURNED_CANDIDATES] for each in (boxes, angles, classes))
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
    """Compute ProbIoU of every box with every other: float64 [k, m]."""
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
    """Return the turned boxes with the longer side as width and the angle in 0 to pi, as Ultralytics does."""
    swapped = boxes[:, 2] < boxes[:, 3]
    result = boxes.copy()
    result[:, 2] = np.where(swapped, boxes[:, 3], boxes[:, 2])
    result[:, 3] = np.where(swapped, boxes[:, 2], boxes[:, 3])
    return result, np.where(swapped, angles + np.pi / 2, angles) % np.pi


def corners_of(boxes: Array, angles: Array) -> Array:
    """Compute corners [k, 4, 2] from centre, width, height and angle: in order around the box."""
    cos, sin = np.cos(angles), np.sin(angles)
    along = np.stack((boxes[:, 2] / 2 * cos, boxes[:, 2] / 2 * sin), axis=1)
    across = np.stack((-boxes[:, 3] / 2 * sin, boxes[:, 3] / 2 * cos), axis=1)
    centre = boxes[:, :2]
    return np.stack(
        (centre + along + across, centre + along - across, centre - along - across, centre - along + across), axis=1
    )


class _Windows(NamedTuple):
    """Parts of prototypes for boxes, each [k, 2] for x and y: from `first` to before `last`.

    `shifts` and `enlarged`: if prototypes are enlarged, the place of the first sample and the number of samples.
    `offsets` and `sizes`: of the samples that are the image's pixels; a size may be 0.
    """

    first: Array
    last: Array
    shifts: Array
    enlarged: Array
    offsets: Array
    sizes: Array


class _Scratch:
    """Memory for one mask after the other: new memory costs as much as the computation in it."""

    def __init__(self) -> None:
        self._values = np.empty(0, np.float32)

    def of(self, width: int, height: int) -> Array:
        """Return float32 [height, width] of any content; valid until the next call."""
        if len(self._values) < width * height:
            self._values = np.empty(width * height, np.float32)
        return self._values[: width * height].reshape(height, width)


@dataclass(frozen=True)
class MaskGrid:
    """Position of prototypes in an image, each pair for x and y.

    The image fills a rectangle of the network's input; `first` and `last` are its sides in prototypes enlarged
    `enlargement` times, and `size` is that of the image. Masks are first enlarged until the rectangle has whole pixels,
    then cut, then resized to the image, here and in Ultralytics.
    """

    enlargement: int
    first: tuple[int, int]
    last: tuple[int, int]
    size: tuple[int, int]

    @classmethod
    def of(
        cls, ratio: tuple[float, float], rectangle: tuple[float, float, float, float], size: tuple[int, int]
    ) -> MaskGrid:
        """Build a grid. `ratio`: prototypes per pixel of the input; `rectangle`: x1, y1, x2, y2 in these pixels."""
        places = np.array(rectangle) * np.tile(ratio, 2)
        enlargement = next((each for each in (1, 2) if np.allclose(places * each, (places * each).round())), 4)
        x1, y1, x2, y2 = (round(float(place)) for place in places * enlargement)
        return cls(enlargement, (x1, y1), (max(x1 + 1, x2), max(y1 + 1, y2)), size)

    def masks(self, coefficients: Array, prototypes: Array, boxes: Array) -> Iterator[tuple[Array, int, int]]:
        """Yield each instance's mask within its box: uint8 [h, w] of 0 and 1, and the x and y of its first pixel.

        coefficients: [k, m]; prototypes: float32 [m, ph, pw]; boxes: [k, 4], x1, y1, x2, y2 in pixels of the image.
        Only the part of the prototypes for a box is read. If boxes are large or overlap, several instances share one
        part: reading prototypes costs more than multiplying them.
        """
        windows = self._windows(boxes, prototypes.shape)
        pixels = np.ceil(boxes[:, :2]).astype(int).tolist()
        scratch, steps = _Scratch(), self._steps()
        areas = (windows.last - windows.first).prod(axis=1) * (windows.sizes > 0).all(axis=1)
        for start in range(0, len(boxes), _TOGETHER):
            some = np.flatnonzero(areas[start : start + _TOGETHER]) + start
            together = None
            x1, y1 = windows.first[some].min(axis=0, initial=1 << 30).tolist()
            x2, y2 = windows.last[some].max(axis=0, initial=0).tolist()
            if areas[some].sum() > (x2 - x1) * (y2 - y1):
                if x2 - x1 > _MOST_OF_A_ROW * prototypes.shape[2]:
                    x1, x2 = 0, prototypes.shape[2]
                together = combined(coefficients[start : start + _TOGETHER], prototypes[:, y1:y2, x1:x2])
            for number in range(start, min(start + _TOGETHER, len(boxes))):
                if not areas[number]:
                    yield np.zeros((0, 0), np.uint8), *pixels[number]
                    continue
                (left, top), (right, bottom) = windows.first[number].tolist(), windows.last[number].tolist()
                if together is not None:
                    logits = together[number - start, top - y1 : bottom - y1, left - x1 : right - x1]
                else:
                    logits = combined(coefficients[number : number + 1], prototypes[:, top:bottom, left:right])[0]
                yield self._mask(logits, windows, number, steps, scratch), *pixels[number]

    def _windows(self, boxes: Array, shape: tuple[int, ...]) -> _Windows:
        corners = np.ceil(boxes).astype(np.int64)
        starts, sizes = corners[:, :2], (corners[:, 2:] - corners[:, :2]).clip(0)
        begin, end, lengths = np.array(self.first), np.array(self.last), np.array((shape[2], shape[1]))
        # Pixel centres: half a pixel lies between their corners and these.
        places = (starts + 0.5) * self._steps() - 0.5 + begin
        low = (np.floor(places) - 1).clip(begin, end - 1).astype(np.int64)
        high = np.minimum(np.maximum(np.ceil(places + sizes * self._steps()) + 2, low + 1), end).astype(np.int64)
        least, greatest = low, high  # Without the padding, which would mix into the image's edge.
        if self.enlargement > 1:
            least = (low // self.enlargement - 1).clip(0, lengths - 1)
            greatest = np.minimum(np.maximum(high // self.enlargement + 2, least + 1), lengths)
        shifts = (low + 0.5) / self.enlargement - 0.5 - least
        return _Windows(least, greatest, shifts, high - low, places - (least if self.enlargement == 1 else low), sizes)

    def _steps(self) -> Array:
        steps: Array = (np.array(self.last) - np.array(self.first)) / np.array(self.size)
        return steps

    def _mask(self, logits: Array, windows: _Windows, number: int, steps: Array, scratch: _Scratch) -> Array:
        if self.enlargement > 1:
            scale = 1 / self.enlargement
            columns, rows = windows.enlarged[number].tolist()
            enlarged, x, y = _sampled(logits, (scale, scale), windows.shifts[number], (columns, rows), _Scratch())
            logits = enlarged[y : y + rows, x : x + columns]
        width, height = windows.sizes[number].tolist()
        found, x, y = _sampled(logits, steps, windows.offsets[number], (width, height), scratch)
        # Computed on the whole contiguous array: on a part, row by row, this takes twice as long.
        return (found > 0).view(np.uint8)[y : y + height, x : x + width]


def combined(coefficients: Array, prototypes: Array) -> Array:
    """Compute logits of masks, float32 [k, h, w], from [k, m] and float32 [m, h, w].

    The pieces are so small that NumPy's BLAS computes each in this thread. For the whole product it would take every
    core and busy-wait for them, which took up to 20 times as long when the cores had other work.
    """
    rows, flat = np.asarray(coefficients, np.float32), np.asarray(prototypes, np.float32).reshape(len(prototypes), -1)
    (count, depth), length = rows.shape, flat.shape[1]
    logits = np.empty((count, length), np.float32)
    piece = max(_LEAST_COLUMNS, _ALONE // (count * depth) // _LEAST_COLUMNS * _LEAST_COLUMNS)
    pieces, end = length // piece, length // piece * piece

    def stacked(array: Array) -> Array:
        found: Array = array[:, :end].reshape(len(array), pieces, piece).swapaxes(0, 1)
        return found

    if pieces:
        np.matmul(rows, stacked(flat), out=stacked(logits))
    np.matmul(rows, flat[:, end:], out=logits[:, end:])
    return logits.reshape(count, *prototypes.shape[1:])


def _sampled(values: Array, steps: Pair, offsets: Pair, size: Pair, scratch: _Scratch) -> tuple[Array, int, int]:
    """Sample [h, w] bilinearly at x * step + offset; return the place of the first sample in the result, too."""
    (step_x, step_y), (x, y), (width, height) = map(float, steps), map(float, offsets), map(int, size)
    factor_x, factor_y = round(1 / step_x), round(1 / step_y)
    # If each value becomes a whole number of samples, enlarging all is seven times as fast, with the same result.
    shift_x, shift_y = (x + 0.5) * factor_x - 0.5, (y + 0.5) * factor_y - 0.5
    first_x, first_y = round(shift_x), round(shift_y)
    enlarged = values.shape[1] * factor_x, values.shape[0] * factor_y
    if (
        max(abs(step_x * factor_x - 1), abs(step_y * factor_y - 1)) < 1e-9
        and max(abs(shift_x - first_x), abs(shift_y - first_y)) < 1e-6
        and 0 <= first_x <= enlarged[0] - width
        and 0 <= first_y <= enlarged[1] - height
    ):
        whole: Array = cv2.resize(values, enlarged, dst=scratch.of(*enlarged), interpolation=cv2.INTER_LINEAR)
        return whole, first_x, first_y
    matrix = np.array([[step_x, 0, x], [0, step_y, y]], np.float64)
    flags = cv2.INTER_LINEAR | cv2.WARP_INVERSE_MAP
    memory = scratch.of(width, height)
    sampled: Array = cv2.warpAffine(
        values, matrix, (width, height), dst=memory, flags=flags, borderMode=cv2.BORDER_REPLICATE
    )
    return sampled, 0, 0


def polygons_of(mask: Array, x: int, y: int, most: int) -> list[Array] | None:
    """Return the outer contours of a mask whose first pixel is at (x, y): rings, int32 [points, 2], the largest first.

    Holes are left out. Beyond `most` points in all, the smallest rings and single points of the others are, too. None
    if the mask is empty.
    """
    contours, _ = cv2.findContours(mask, cv2.RETR_EXTERNAL, cv2.CHAIN_APPROX_SIMPLE, offset=(x, y))
    if not contours:
        return None
    rings: list[Array] = []
    for contour in sorted(contours, key=len, reverse=True):
        ring = contour[:: -(-len(contour) // max(1, most))]
        if len(ring) < 3:
            break
        most -= len(ring)
        rings.append(ring.reshape(-1, 2))
    return rings


def mask_reduction(width: int, height: int) -> float:
    """Return the factor by which an image is reduced for its masks, at most 1."""
    return min(1.0, _MASK_SIDE / max(width, height))


_RUNS_TOGETHER = 100_000
"""Largest number of runs, over all masks, that are written at once: their numbers take 100 bytes each."""


def written(
    form: Literal["rle", "png"], parts: Iterable[tuple[Array, int, int]], width: int, height: int
) -> Iterator[dict[str, Any] | None]:
    """Yield each mask in an answer's form, for an image of `width` x `height`; None for an empty one.

    parts: masks within their boxes, uint8 [h, w] of 0 and 1, and the x and y of their first pixel.
    """
    if form == "png":
        for mask, x, y in parts:
            levels = mask * np.uint8(255)
            yield {"size": [height, width], "x": x, "y": y, "png": grey_png(levels)} if mask.any() else None
        return
    waiting: list[Array] = []
    for mask, x, y in parts:
        waiting.append(run_lengths(mask, x, y, width, height))
        if sum(map(len, waiting)) > _RUNS_TOGETHER:
            yield from _counts(waiting, width, height)
            waiting = []
    yield from _counts(waiting, width, height)


def _counts(each: Sequence[Array], width: int, height: int) -> Iterator[dict[str, Any] | None]:
    for runs, counts in zip(each, compressed(each), strict=True):
        yield {"size": [height, width], "counts": counts} if len(runs) > 1 else None


def run_lengths(mask: Array, x: int, y: int, width: int, height: int) -> Array:
    """Return lengths of alternating runs of 0 and 1, 0 first, of a whole image's mask, column by column: int64 [runs].

    mask: uint8 [h, w] of 0 and 1, whose first pixel is (x, y) of an image of `width` x `height`.
    """
    mask = mask[: max(0, height - y), : max(0, width - x)]
    # A zero before the first column and after each: so changes alternate between a run's start and its stop.
    side = mask.shape[0] + 1
    padded = np.empty(mask.shape[1] * side + 1, np.uint8)
    padded[::side] = 0
    if mask.size:
        padded[1:].reshape(mask.shape[1], side)[:, :-1] = cv2.transpose(mask)
    changes = np.flatnonzero(padded[1:] != padded[:-1])
    changes += changes // side * (height - side) + (x * height + y)
    # A run may continue in the next column: then it neither stops nor starts there.
    same = np.flatnonzero(changes[1:-1:2] == changes[2::2])
    if len(same):
        changes = np.delete(changes, np.concatenate((2 * same + 1, 2 * same + 2)))
    runs = np.empty(len(changes) + 1, np.int64)
    runs[:-1] = changes
    runs[-1] = width * height
    runs[1:] -= changes
    return runs[:-1] if len(changes) and not runs[-1] else runs


def compressed(each: Sequence[Array]) -> list[str]:
    """Write run lengths of masks as the texts of pycocotools; all masks at once, which takes less time.

    From the fourth on, a length is written as its difference to the one two before. A number is written in groups of
    five bits, the least first; the sixth bit says that more follow, and the last group's fifth bit is the sign.
    """
    counts = np.array([len(runs) for runs in each], np.int64)
    lengths = np.concatenate([np.empty(0, np.int64), *each])
    ends = counts.cumsum()
    values = lengths.copy()
    values[2:] -= lengths[:-2]
    first = (ends - counts)[:, None] + np.arange(3)
    first = first[first < ends[:, None]]
    values[first] = lengths[first]
    # The bits of a number without its sign, and one for the sign.
    magnitudes = values ^ (values >> 63)
    most = int(magnitudes.max(initial=0)).bit_length() // 5 + 1
    sizes = np.ones(len(values), np.int64)
    for group in range(1, most):
        sizes += magnitudes >= 1 << (5 * group - 1)
    stops = sizes.cumsum()
    text = np.empty(int(sizes.sum()), np.uint8)
    starts = stops - sizes
    for group in range(most):
        longer = np.flatnonzero(sizes > group + 1)
        text[starts + group] = (values & 31) + 48
        text[starts[longer] + group] += 32
        values, sizes, starts = values[longer] >> 5, sizes[longer], starts[longer]
    whole = text.tobytes().decode("ascii")
    places = [0, *np.append(0, stops)[ends].tolist()]
    return [whole[start:stop] for start, stop in pairwise(places)]


def grey_png(levels: Array) -> str:
    """Encode grey levels [h, w], uint8 or uint16, as base64 of a PNG of 8 or 16 bits."""
    _, encoded = cv2.imencode(".png", levels)
    return base64.b64encode(encoded.tobytes()).decode("ascii")
