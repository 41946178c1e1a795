"""Masks as other programs read them: run lengths as COCO writes them, and PNG.

Owns: these two forms. Must not know networks or requests. A mask is given as the part within its box, so that both cost
what the box costs, however large the image is.
"""

from __future__ import annotations

import base64

import cv2
import numpy as np

from models.model import Array


def run_lengths(mask: Array, x: int, y: int, width: int, height: int) -> list[int]:
    """Lengths of runs of 0 and 1, by turns, 0 first, of a mask of a whole image, column by column.

    mask: uint8 [h, w] of 0 and 1, whose first pixel is (x, y) of an image of `width` x `height`.
    """
    mask = mask[: max(0, height - y), : max(0, width - x)]
    # A zero before the first column and after each: so changes are by turns the start and the stop of a run.
    side = mask.shape[0] + 1
    padded = np.zeros(mask.shape[1] * side + 1, np.uint8)
    if mask.size:
        padded[1:].reshape(mask.shape[1], side)[:, :-1] = cv2.transpose(np.ascontiguousarray(mask))
    columns, rows = np.divmod(np.flatnonzero(padded[1:] != padded[:-1]), side)
    changes = (x + columns) * height + y + rows
    starts, stops = changes[::2], changes[1::2]
    apart = np.flatnonzero(starts[1:] != stops[:-1])  # A run may go on in the next column.
    starts = np.concatenate((starts[:1], starts[1:][apart]))
    stops = np.concatenate((stops[:-1][apart], stops[-1:]))
    places = np.stack((starts, stops), axis=1).reshape(-1)
    runs: list[int] = np.diff(places, prepend=0, append=width * height).tolist()
    return runs[:-1] if len(places) and not runs[-1] else runs


def compressed(runs: list[int]) -> str:
    """Run lengths as the text that pycocotools writes and reads.

    From the fourth on, a length is written as its difference to the one two before. A number is written in groups of
    five bits, the least first; the sixth bit says that more follow, and the last group's fifth bit is the sign.
    """
    lengths = np.array(runs, np.int64)
    values = lengths.copy()
    values[3:] -= lengths[1:-2]
    # As many bits as a number has without its sign, and one for that.
    magnitudes = values ^ (values >> 63)
    most = int(magnitudes.max(initial=0)).bit_length() // 5 + 1
    sizes = np.ones(len(values), np.int64)
    for group in range(1, most):
        sizes += magnitudes >= 1 << (5 * group - 1)
    stops = sizes.cumsum()
    text = np.empty(int(sizes.sum()), np.uint8)
    starts = stops - sizes
    for group in range(most):
        text[starts + group] = (values & 31) + np.where(sizes > group + 1, 32 + 48, 48)
        longer = sizes > group + 1
        values, sizes, starts = values[longer] >> 5, sizes[longer], starts[longer]
    return text.tobytes().decode("ascii")


def png(mask: Array) -> str:
    """A mask uint8 [h, w] of 0 and 1 as base64 of a PNG of 0 and 255."""
    _, encoded = cv2.imencode(".png", mask * np.uint8(255))
    return base64.b64encode(encoded.tobytes()).decode("ascii")
