"""Comparison of two runs of a detector: each run orders the anchors by its own scores, and cuts there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Arrays = Sequence[npt.NDArray[Any]]
_BEST = 300


def both_by_anchor(ours: Arrays, right: Arrays) -> tuple[Arrays, Arrays]:
    """Return both answers for the anchors that both have, by number; leave other answers unchanged.

    The best anchors of the right answer have to be among them.
    """
    if len(right) != 4 or right[3].dtype != np.int32:
        return ours, right
    pairs = []
    for mine, theirs in zip(ours[3], right[3], strict=True):
        common, here, there = np.intersect1d(mine, theirs, return_indices=True)
        assert np.isin(theirs[:_BEST], common).mean() > 0.99
        pairs.append((here, there))
    both = [
        [np.concatenate([each[row][pair[side]] for row, pair in enumerate(pairs)]) for each in answer]
        for side, answer in enumerate((ours, right))
    ]
    return both[0], both[1]
