"""What rfdetr itself exports for segmentation, compared with what it predicts from the same weights."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from benchmarks.zoo.alive import spread_queries
from models import open_model, parse_spec
from models.contract.model import Array
from tests.support import exports_of_networks
from tests.support.images import whole_mask
from tests.support.library_folders import photograph

LABELS = ("cat", "dog", "kite")
LEAST = 0.02


def answered(model: Any, image: Array, **options: Any) -> list[dict[str, Any]]:
    pixels = torch.zeros(model.input_shape, dtype=torch.uint8)
    placement = model.preprocess(torch.from_numpy(image), pixels, *image.shape[1::-1])
    found = exports_of_networks.answered(model, pixels[None], placement, score_threshold=LEAST, **options)
    detections: list[dict[str, Any]] = found["detections"]
    return detections


def predicted(network: Any, image: Array) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = network.predict(Image.fromarray(image), threshold=LEAST)
    return found[found.class_id < len(LABELS)]  # rfdetr answers with the background, too.


def test_an_export_answers_as_rfdetr_predicts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It has three classes and the background, so that boxes and scores have equal shapes, and of few places each is a
    query. Of its instances at least 98 % are there, with the same class, within a pixel.
    """
    rfdetr = pytest.importorskip("rfdetr")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        of_classes = {"pretrain_weights": None, "num_classes": len(LABELS), "device": "cpu"}
        network = rfdetr.RFDETRSegNano(resolution=120, **of_classes)
        spread_queries(network.model.model, seed=1)
        file = Path(network.export(output_dir=str(tmp_path), verbose=False))
    file.with_name(f"{file.stem}.labels.txt").write_text("\n".join(LABELS))
    caplog.set_level("INFO")
    model: Any = open_model(parse_spec(f"mine={file}"), tmp_path)
    assert (model.task, model.labels, model.export.how.layout) == ("segment", LABELS, "rfdetr")
    assert "an unused class first, so put a name for that before the labels" in caplog.text
    # rfdetr resizes in float32, which would move random masks and what goes with them too far.
    image = np.ascontiguousarray(photograph()[: model.input_shape[0], : model.input_shape[1]])
    mine = answered(model, image, masks="none")  # Else instances whose masks are empty within their boxes are none.
    masked = {(*each["box"].values(), each["class_id"]): each for each in answered(model, image, masks="png")}
    theirs = predicted(network, image)
    assert len(theirs) >= 20
    assert theirs.confidence.std() > 0.05
    boxes = np.array([[*each["box"].values()] for each in mine])
    scores, classes = (np.array([each[name] for each in mine]) for name in ("score", "class_id"))
    alike, shared = 0, []
    for number, box in enumerate(theirs.xyxy):
        near = (np.abs(boxes - box).max(1) < 1) & (np.abs(scores - theirs.confidence[number]) < 1e-3)
        found = np.flatnonzero(near & (classes == theirs.class_id[number]))
        alike += bool(len(found))
        if len(found) and (key := (*boxes[found[0]], classes[found[0]])) in masked:
            (x1, y1, x2, y2), one = np.ceil(box).astype(int), whole_mask(masked[key]["mask"])
            other = np.zeros_like(one)
            other[y1:y2, x1:x2] = theirs.mask[number][y1:y2, x1:x2]  # Masks are cut at their boxes here.
            shared.append((one & other).sum() / (one | other).sum())
    assert alike >= 0.98 * len(theirs)
    assert len(shared) >= 20
    assert np.mean(shared) > 0.98
