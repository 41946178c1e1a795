"""The forms in which DeepStack's and X-AnyLabeling's programs want what was found."""

from __future__ import annotations

from importlib import metadata

import pytest
from pydantic import ValidationError

from anychip_compat import deepstack, labelling
from app.config import Settings, values

BOX = {"x1": 1.4, "y1": 2.6, "x2": 11.0, "y2": 22.0}
CAT = {"label": "cat", "class_id": 3, "score": 0.5, "box": BOX}


def drawn(found, index=0):
    return [(each["shape_type"], each["points"], each["group_id"]) for each in labelling._shapes(found, index)]


def test_deepstack_has_whole_pixels():
    places = {"x_min": 1, "y_min": 3, "x_max": 11, "y_max": 22}
    assert deepstack._shaped(CAT) == {"label": "cat", "confidence": 0.5, **places}


def test_a_box_is_drawn_by_its_corners():
    assert drawn(CAT) == [("rectangle", [[1.4, 2.6], [11.0, 2.6], [11.0, 22.0], [1.4, 22.0]], None)]


def test_each_outline_is_closed_and_in_place_of_the_box():
    rings = [[[0, 0], [4, 0], [4, 4]], [[9, 9], [9, 8], [8, 8]]]
    closed = [[[0, 0], [4, 0], [4, 4], [0, 0]], [[9, 9], [9, 8], [8, 8], [9, 9]]]
    assert drawn({**CAT, "segments": rings}) == [("polygon", ring, None) for ring in closed]


def test_a_turned_box_has_its_angle():
    corners = [[0, 1], [2, 3], [4, 5], [6, 7]]
    [shape] = labelling._shapes({**CAT, "corners": corners, "obb": {"angle": 0.25}}, 0)
    assert (shape["shape_type"], shape["points"], shape["direction"]) == ("rotation", corners, 0.25)


def test_key_points_that_are_seen_are_of_the_group_of_their_box():
    points = [{"x": 5, "y": 6, "score": 0.9}, {"x": 7, "y": 8, "score": 0.2}]
    box, point = drawn({**CAT, "keypoints": points}, 6)
    assert (box[0], box[2]) == ("rectangle", 7)
    assert point == ("point", [[5, 6]], 7)


def test_every_installation_has_these_clients_and_an_unknown_one_is_told_which_there_are():
    brought = metadata.distribution("anychip").entry_points.select(group=values.CLIENT_GROUP)
    assert brought.names == {"deepstack", "triton-metrics", "x-anylabeling"}
    assert Settings(compat=",".join(sorted(brought.names))).compat
    with pytest.raises(ValidationError, match=r"'nonsense' is none of [a-z, -]*deepstack[a-z, -]+ \[type"):
        Settings(compat="nonsense")
