"""Comparison of two runs of a detector: each run orders the anchors by its own scores, and cuts there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Arrays = Sequence[npt.NDArray[Any]]
_BEST = 300


def by_anchor(outputs: Sequence[Any]) -> list[Tensor]:
    """Sort a detector's outputs, the last of which numbers the anchors, by these; return a single output unchanged."""
    found = [torch.as_tensor(each) for each in outputs]
    if len(found) == 1:
        return found
    order = found[-1].argsort(dim=1)
    return [each.take_along_dim(order.view(*order.shape, *[1] * (each.ndim - 2)), 1) for each in found]


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
