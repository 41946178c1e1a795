"""Masks and maps in common forms: run lengths of COCO, and PNG.

Owns: these two forms. Must not know networks or requests. A mask of an instance is the part within its box, so that the
cost is that of the box, however large the image is.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any, Literal

import cv2
import numpy as np

from models.contract.model import Array

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
            yield {"size": [height, width], "x": x, "y": y, "png": png(mask)} if mask.any() else None
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


def png(mask: Array) -> str:
    """Encode a mask uint8 [h, w] of 0 and 1 as base64 of a PNG of 0 and 255."""
    return grey_png(mask * np.uint8(255))


def grey_png(levels: Array) -> str:
    """Encode grey levels [h, w], uint8 or uint16, as base64 of a PNG of 8 or 16 bits."""
    _, encoded = cv2.imencode(".png", levels)
    return base64.b64encode(encoded.tobytes()).decode("ascii")
