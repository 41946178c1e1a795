"""The average precision by which detectors are measured."""

from __future__ import annotations

import numpy as np
import pytest

from models.tasks.accuracy import Boxes, average_precision


def _boxes(*rows: tuple[float, float, float, float, int, float]) -> Boxes:
    table = np.array(rows, dtype=np.float32).reshape(-1, 6)
    return Boxes(table[:, :4], table[:, 4].astype(np.int64), table[:, 5])


TRUE = _boxes((0, 0, 10, 10, 0, 1), (20, 20, 30, 30, 0, 1))


@pytest.mark.parametrize(
    ("found", "wanted"),
    [
        (_boxes((0, 0, 10, 10, 0, 0.9), (20, 20, 30, 29, 0, 0.8)), 1.0),
        (_boxes(), 0.0),
        (_boxes((0, 0, 10, 10, 1, 0.9)), 0.0),
        (_boxes((0, 0, 10, 4, 0, 0.9)), 0.0),
        (_boxes((0, 0, 10, 10, 0, 0.9)), 51 / 101),
        (_boxes((0, 0, 10, 10, 0, 0.9), (0, 0, 10, 10, 0, 0.8)), 51 / 101),
        (_boxes((50, 50, 60, 60, 0, 0.9), (0, 0, 10, 10, 0, 0.8)), 51 / 101 / 2),
    ],
    ids=["all right", "nothing found", "another class", "too far off", "half of them", "a double", "one false alarm"],
)
def test_average_precision(found: Boxes, wanted: float) -> None:
    assert average_precision([TRUE], [found], 0) == pytest.approx(wanted)
