"""How two stages are written, and which boxes are cut out."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.config import Settings
from app.serving.cascades import TwoStages, parse_cascade
from models import ModelError


def test_they_are_written_with_a_sign_between_them() -> None:
    found = parse_cascade("plates=cars=yolov8n:best.pt?classes=car|traffic light&margin=0.1&most=5 > resnet50")
    assert found == TwoStages("plates", "cars", "resnet50", ("car", "traffic light"), 0.1, 8.0, 5)
    assert parse_cascade("a=best.onnx>kinds") == TwoStages("a", "best", "kinds")


@pytest.mark.parametrize(
    "text",
    [
        "yolov8n > resnet50",
        "a/b=yolov8n > resnet50",
        "a=yolov8n?colour=blue > resnet50",
        "a=yolov8n?margin=2 > resnet50",
        "a=yolov8n?most=0 > resnet50",
    ],
)
def test_what_is_not_understood_is_said_in_a_sentence(text: str) -> None:
    with pytest.raises(ModelError) as caught:
        parse_cascade(text)
    assert "\n" not in str(caught.value)


def test_stages_that_are_not_named_elsewhere_are_served_as_well():
    settings = Settings(models="kinds=resnet18,a=yolov8n?most=3 > kinds,b=yolov8n > resnet50:random")
    assert settings.model_specs == ("kinds=resnet18", "yolov8n", "resnet50:random")
    assert [parse_cascade(each).name for each in settings.stage_specs] == ["a", "b"]


SPANS = st.tuples(st.floats(0, 300), st.floats(0, 300)).map(sorted)


@given(st.lists(st.tuples(SPANS, SPANS), max_size=8), st.integers(1, 300), st.integers(1, 300), st.floats(0, 1))
def test_regions_lie_within_the_image(boxes: Any, width: int, height: int, margin: float) -> None:
    found: list[dict[str, Any]] = []
    for number, ((x1, x2), (y1, y2)) in enumerate(boxes):
        box = {"x1": min(x1, width), "y1": min(y1, height), "x2": min(x2, width), "y2": min(y2, height)}
        found.append({"label": "ba"[number % 2], "box": box})
    chosen = TwoStages("n", "d", "c", ("b",), margin, 2.0, 3).regions(found, width, height)
    assert len(chosen) <= 3
    for number, region in chosen:
        box = found[number]["box"]
        assert number % 2 == 0
        assert min(region.width, region.height) >= 1
        assert 0 <= region.x <= box["x1"] <= box["x2"] <= region.x + region.width <= width
        assert 0 <= region.y <= region.y + region.height <= height
