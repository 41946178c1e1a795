"""Other people's newest releases: one whose internals ours subclass, and one whose figures ours must equal."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models.tasks.accuracy import as_boxes, mean_average_precision
from tests.support.vendor_sources import ROOT, unpacked

pytestmark = pytest.mark.nightly


def test_the_newest_uvicorn_fits_our_connection(tmp_path: Path) -> None:
    """pyproject.toml has no upper bound, so that installations get it before constraints.txt does."""
    environment = unpacked("uvicorn", tmp_path)
    tests = ("tests/unit/test_connection.py", "tests/unit/test_sending.py", "tests/virtual/test_hot.py")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_average_precision_is_that_of_cocos_evaluator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    unpacked("pycocotools", tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    coco: Any = importlib.import_module("pycocotools.coco").COCO()
    evaluation: Any = importlib.import_module("pycocotools.cocoeval")
    random = np.random.default_rng(0)
    truth: list[list[dict[str, Any]]] = []
    found: list[list[dict[str, Any]]] = []
    for _ in range(20):
        corners = random.uniform(0, 400, (6, 2))
        true = np.concatenate([corners, corners + random.uniform(20, 200, (6, 2))], 1)
        others = random.uniform(0, 100, (3, 4)) + np.array([0, 0, 100, 100])
        boxes = np.concatenate([true + random.normal(0, 8, true.shape), others])
        classes = random.integers(0, 4, 6)
        guesses = np.concatenate([np.where(random.random(6) < 0.8, classes, 3 - classes), random.integers(0, 4, 3)])
        truth.append([_object(box, int(each), 1.0) for box, each in zip(true, classes, strict=True)])
        found.append(
            [_object(box, int(each), float(random.random())) for box, each in zip(boxes, guesses, strict=True)]
        )
    coco.dataset = {
        "images": [{"id": number} for number in range(len(truth))],
        "categories": [{"id": number} for number in range(4)],
        "annotations": [
            {**_coco(each, number), "id": 10 * number + place + 1, "iscrowd": 0}
            for number, image in enumerate(truth)
            for place, each in enumerate(image)
        ],
    }
    coco.createIndex()
    results = coco.loadRes([_coco(each, number) for number, image in enumerate(found) for each in image])
    evaluator = evaluation.COCOeval(coco, results, "bbox")
    evaluator.evaluate()
    evaluator.accumulate()
    evaluator.summarize()
    capsys.readouterr()
    ours = [as_boxes(image) for image in truth], [{"detections": image} for image in found]
    assert 0.2 < evaluator.stats[1] < 0.9
    assert mean_average_precision(*ours) == pytest.approx(evaluator.stats[0], abs=1e-3)
    assert mean_average_precision(*ours, (0.5,)) == pytest.approx(evaluator.stats[1], abs=1e-3)


def _object(box: Any, class_id: int, score: float) -> dict[str, Any]:
    corners = dict(zip(("x1", "y1", "x2", "y2"), map(float, box), strict=True))
    return {"class_id": class_id, "score": score, "box": corners}


def _coco(found: dict[str, Any], image: int) -> dict[str, Any]:
    box = found["box"]
    width, height = box["x2"] - box["x1"], box["y2"] - box["y1"]
    return {
        "image_id": image,
        "category_id": found["class_id"],
        "score": found["score"],
        "bbox": [box["x1"], box["y1"], width, height],
        "area": width * height,
    }
