"""The shipped weights are as good as what is written beside them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks.sample_training import evaluate
from models.publishers import SAMPLES_IN_SOURCES


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "made", "measure", "count", "less"),
    # Of the held-out images the first few: what is less is two to three standard deviations of so few.
    [
        ("resnet50", evaluate.classifier, evaluate.top1, 64, 0.05),
        ("yolov8n", evaluate.detector, evaluate.map50, 16, 0.1),
    ],
)
def test_the_shipped_weights_are_as_good_as_recorded(
    name: str, made: Any, measure: Any, count: int, less: float
) -> None:
    recorded = json.loads((SAMPLES_IN_SOURCES / "quality.json").read_text())[name]
    found = measure(made(SAMPLES_IN_SOURCES / f"{name}.safetensors"), recorded["image_seed"], count)
    assert found >= recorded[measure.__name__] - less
