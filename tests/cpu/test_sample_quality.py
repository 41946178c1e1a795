"""The shipped weights are as good as what is written beside them."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from benchmarks.sample_training import evaluate, images
from benchmarks.sample_training.evaluate import Served
from benchmarks.sample_training.loss import (
    iou,
)
from models import publishers, sample
from models.sample.generator import KINDS
from models.tasks.accuracy import as_boxes

DIRECTORY = publishers.SAMPLES_IN_SOURCES


def _expected() -> Any:
    return json.loads((sample.IMAGES / "expected.json").read_text())


def _quality() -> Any:
    return json.loads((DIRECTORY / "quality.json").read_text())


@pytest.fixture(scope="module")
def classifier() -> Served:
    return Served(evaluate.classifier(DIRECTORY / "resnet50.safetensors"))


@pytest.fixture(scope="module")
def detector() -> Served:
    return Served(evaluate.detector(DIRECTORY / "yolov8n.safetensors"))


def test_the_classifier_is_as_good_as_recorded() -> None:
    # The first 64 of the held-out images: 0.08 is two to three standard deviations of so few.
    recorded = _quality()["resnet50"]
    found = evaluate.top1(evaluate.classifier(DIRECTORY / "resnet50.safetensors"), recorded["image_seed"], 64)
    assert found >= recorded["top1"] - 0.05


def test_the_detector_is_as_good_as_recorded() -> None:
    recorded = _quality()["yolov8n"]
    found = evaluate.map50(evaluate.detector(DIRECTORY / "yolov8n.safetensors"), recorded["image_seed"], 16)
    assert found >= recorded["map50"] - 0.1


@pytest.mark.parametrize("name", sorted(images.CLASSIFICATION_SAMPLES))
def test_a_sample_image_is_classified(name: str, classifier: Served) -> None:
    first = classifier.predict(np.array(Image.open(sample.IMAGES / name)))["classes"][0]
    assert first["label"] == _expected()[name]["label"]


@pytest.mark.parametrize("name", sorted(images.DETECTION_SAMPLES))
def test_a_sample_image_is_detected(name: str, detector: Served) -> None:
    answer = detector.predict(np.array(Image.open(sample.IMAGES / name)))
    found, objects = as_boxes(answer["detections"]), _expected()[name]["objects"]
    wanted = torch.tensor([[o["box"][side] for side in ("x1", "y1", "x2", "y2")] for o in objects])
    overlaps = iou(wanted.unsqueeze(1), torch.from_numpy(found.boxes).unsqueeze(0))
    assert len(found.boxes) == len(objects)
    assert (overlaps.amax(dim=1) > 0.7).all()
    assert [KINDS[found.classes[i]] for i in overlaps.argmax(dim=1)] == [o["label"] for o in objects]
