"""What `python -m benchmarks.zoo` takes for the same answer: wrong ones are planted, and none passes."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.zoo.comparing import DEFAULT, FLOAT32, THRESHOLD, compare
from benchmarks.zoo.networks import Floats, Kind, pictures
from benchmarks.zoo.table import NETWORKS

BOXES = np.array([[10, 10, 50, 60, 0.9, 1], [100, 20, 160, 90, 0.6, 2], [30, 30, 70, 80, 0.4, 1]], np.float32)
ANSWERS: dict[Kind, Floats] = {
    "scores": np.array([0.1, 0.7, 0.2], np.float32),
    "boxes": BOXES,
    "vector": np.array([1.0, -2.0, 0.5], np.float32),
    "values": np.array([31.5, 2.0], np.float32),
    "class_map": np.arange(100, dtype=np.float32).reshape(10, 10) // 25,
    "depth": np.linspace(1, 9, 12, dtype=np.float32).reshape(3, 4),
}


def planted(kind: Kind) -> list[Floats]:
    """Wrong answers of one kind."""
    right = ANSWERS[kind]
    if kind == "scores":
        return [right[[1, 0, 2]], right + np.array([0.0, -0.2, 0.2], np.float32), np.append(right, np.float32(0.1))]
    if kind == "boxes":
        moved, named, unsure = right.copy(), right.copy(), right.copy()
        moved[0, :4] += 20
        named[1, 5] = 1
        unsure[0, 4] -= 0.3
        return [moved, named, unsure, right[:2], np.concatenate((right, right[:1] + 90)), right[:0]]
    if kind == "class_map":
        other = right.copy()
        other[:, 0] = 7
        return [other, right.T, right[:5]]
    return [right[::-1], -right, right[:1]]


@pytest.mark.parametrize("limits", [FLOAT32, DEFAULT], ids=["fp32", "default"])
@pytest.mark.parametrize("kind", ANSWERS)
def test_the_same_answer_is_the_same_and_a_wrong_one_of_any_picture_is_not(kind, limits):
    right = ANSWERS[kind]
    assert compare(kind, [right] * 3, [right] * 3, limits).same
    for wrong in planted(kind):
        assert not compare(kind, [right] * 3, [right, wrong, right], limits).same, wrong


def test_a_box_is_compared_by_the_limits_and_may_lack_its_counterpart_about_the_threshold_alone():
    moved = BOXES.copy()
    moved[0, :4] += 2
    assert not compare("boxes", [BOXES], [moved], FLOAT32).same
    assert compare("boxes", [BOXES], [moved], DEFAULT).same
    about = np.append(BOXES, np.array([[5, 5, 9, 9, THRESHOLD + 5e-4, 0]], np.float32), axis=0)
    assert compare("boxes", [BOXES], [about], FLOAT32).same
    assert compare("boxes", [about], [BOXES], FLOAT32).same
    above = about + np.array([0, 0, 0, 0, 0.01, 0], np.float32)
    assert not compare("boxes", [above[:3]], [above], FLOAT32).same
    assert not compare("boxes", [above], [above[:3]], FLOAT32).same


def test_rows_are_those_of_ten_libraries_and_more_and_pictures_are_of_three_kinds():
    assert len({row.library for row in NETWORKS.values()}) >= 10
    assert len(NETWORKS) >= 60
    assert [each.mode for each in pictures()] == ["RGB", "L", "RGBA"]
