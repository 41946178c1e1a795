"""The classes of the highest scores, of one image and of several.

Owns: which classes these are, and in which order. Must not know labels or answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from models.contract.model import Array, softmax

FEW = 16
"""So many classes are found sooner one by one than by sorting."""


def best_of(scores: Array, count: int) -> Array:
    """Numbers of the `count` highest scores of [classes], the highest first; equal scores by ascending number."""
    if not 0 < count < len(scores):
        every: Array = (-scores).argsort(kind="stable")
        return every[: max(count, 0)]
    # Only what is at least as high as the last one wanted is sorted: for 5 of 1000 that takes 8 us, and all of them 46.
    last = len(scores) - count
    parted = scores.copy()
    parted.partition(last)
    least = parted[last]
    candidates: Array = (scores >= least).nonzero()[0]
    if len(candidates) > count:  # Of those as high as the last one wanted, which may be all, only the first.
        above, equal = (scores > least).nonzero()[0], (scores == least).nonzero()[0]
        candidates = np.concatenate((above, equal[: count - len(above)]))
    order: Array = (-scores[candidates]).argsort(kind="stable")
    return candidates[order]


def best_few(scores: Array, count: int) -> Array:
    """`best_of` of each row of [n, classes], none negative -> [n, count]: the highest, the highest of the rest, …"""
    left, rows = scores.copy(), np.arange(len(scores))
    best = np.empty((len(scores), count), np.intp)
    for place in range(count):
        best[:, place] = highest = left.argmax(axis=1)  # Of equals the first.
        left[rows, highest] = -1
    return best


def rounded(scores: Array) -> list[Any]:
    """Five digits of a probability are enough. Lists, as the shape has dimensions."""
    numbers: list[Any] = scores.astype(np.float64).round(5).tolist()
    return numbers


def with_best(logits: Array, counts: Sequence[int]) -> list[tuple[Array, ...]]:
    """Each row of [n, classes] and, where few of its classes are wanted, these: float64 [2, count], numbers and scores.

    `counts`: how many are wanted of each row.
    """
    most = min(max(counts, default=0), logits.shape[1])
    if not 0 < most <= FEW or min(counts) <= 0:
        return [(row,) for row in logits]
    found = np.empty((len(logits), 2, most))
    if len(logits) == 1:  # Then what is for several takes longer.
        scores = softmax(logits[0])
        found[0, 0] = best = best_of(scores, most)
        found[0, 1] = scores[best]
    else:
        scores = softmax(logits)
        found[:, 0] = best = best_few(scores, most)
        found[:, 1] = scores[np.arange(len(scores))[:, None], best]
    found[:, 1].round(5, out=found[:, 1])
    return [(row, each[:, :count]) for row, each, count in zip(logits, found, counts, strict=True)]


def best_in(sent: Sequence[Array], count: int) -> tuple[list[int], list[float]]:
    """Numbers and scores of the best classes: of logits alone, or as `with_best` found them for this `count`."""
    if len(sent) > 1:
        classes, found = sent[1].tolist()
        return [int(each) for each in classes], found
    scores = softmax(sent[0])
    best = best_of(scores, count)
    return best.tolist(), rounded(scores[best])
