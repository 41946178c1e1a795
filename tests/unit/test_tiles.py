"""Where tiles lie, and what remains of their answers."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models import Options
from models.contract.resize import Whole
from models.contract.task_adapter import AdaptedFile, made
from models.tasks.tiles import Tiling, merged, parse_tilings

FILE = AdaptedFile(Whole((640, 640)), ("a", "b"))
DETECT = made("detect", FILE)


@given(st.integers(1, 3000), st.integers(1, 3000), st.integers(32, 1000), st.floats(0, 0.9))
def test_tiles_cover_the_image_and_nothing_else(width: int, height: int, side: int, overlap: float) -> None:
    tiling = Tiling(side, overlap)
    for length in (width, height):
        starts = tiling._starts(length)
        covered = np.zeros(length, bool)
        for start in starts:
            covered[start : start + min(side, length)] = True
        assert covered.all()
        assert starts == sorted(set(starts))
        assert starts[-1] + min(side, length) == length
        assert all(later - earlier <= side * (1 - overlap) + 1 for earlier, later in pairwise(starts))
    assert len(tiling.tiles(width, height)) == len(tiling._starts(width)) * len(tiling._starts(height))


def test_tiles_of_models_are_written_as_side_and_overlap() -> None:
    assert parse_tilings(["cars=640", "boats=512:0.1"]) == {"cars": Tiling(640, 0.2), "boats": Tiling(512, 0.1)}
    for wrong in ("cars", "cars=", "cars=many", "cars=640:", "cars=640:x"):
        with pytest.raises(ValueError, match="is not understood"):
            parse_tilings([wrong])
    for wrong in ("cars=31", "cars=640:0.95", "cars=640:nan"):
        with pytest.raises(ValueError, match="the tiles of cars must be from 32"):
            parse_tilings([wrong])


def instance(x1: float, y1: float, x2: float, y2: float, score: float, class_id: int = 0) -> dict[str, object]:
    box = {"x1": x1, "y1": y1, "x2": x2, "y2": y2}
    return {"label": "a", "class_id": class_id, "score": score, "box": box}


def test_an_object_on_a_seam_is_one_object() -> None:
    left = {"detections": [instance(80, 10, 100, 40, 0.6)]}  # Its left third, cut by the tile's edge.
    right = {"detections": [instance(20, 10, 80, 40, 0.9), instance(20, 10, 80, 40, 0.5, class_id=1)]}
    found = merged(DETECT, [(left, 0, 0), (right, 60, 0)], 200, 100, Options())
    assert [(each["class_id"], each["box"]["x1"]) for each in found["detections"]] == [(0, 80), (1, 80)]


def test_a_small_object_within_a_large_one_of_the_same_tile_stays() -> None:
    part = {"detections": [instance(0, 0, 90, 90, 0.9), instance(10, 10, 30, 30, 0.8)]}
    assert len(merged(DETECT, [(part, 0, 0)], 100, 100, Options())["detections"]) == 2


@pytest.mark.parametrize(
    ("task", "has", "becomes"),
    [
        ("segment", {"segments": [[[1.0, 2.0], [3.0, 4.0]]]}, {"segments": [[[11, 22], [13, 24]]]}),
        ("segment", {}, {}),
        (
            "pose",
            {"keypoints": [{"x": 1.0, "y": 2.0, "score": 0.5}]},
            {"keypoints": [{"x": 11, "y": 22, "score": 0.5}]},
        ),
        (
            "obb",
            {"obb": {"cx": 2.0, "cy": 3.0, "w": 2.0, "h": 2.0, "angle": 0.5}, "corners": [[1.0, 2.0]]},
            {"obb": {"cx": 12, "cy": 23, "w": 2, "h": 2, "angle": 0.5}, "corners": [[11, 22]]},
        ),
    ],
)
def test_everything_an_instance_has_moves_along(task: str, has: dict[str, Any], becomes: dict[str, Any]) -> None:
    found = instance(1, 2, 3, 4, 0.9)
    of_task = made(task, replace(FILE, options='{"keypoints": [1, 3]}'))
    [moved] = merged(of_task, [({"detections": [found | has]}, 10, 20)], 100, 100, Options())["detections"]
    assert moved == found | becomes | {"box": {"x1": 11, "y1": 22, "x2": 13, "y2": 24}}
