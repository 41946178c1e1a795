"""What our own networks of masks answer: the forms of masks agree, and their cost is bounded."""

from __future__ import annotations

import base64
from typing import Any

import cv2
import numpy as np
import pytest

from models import Options, open_model, parse_spec
from models.tasks import segment
from models.tasks.mask_forms import compressed, run_lengths


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return open_model(parse_spec("yolov8n-seg:random"), tmp_path_factory.mktemp("cache"))


def outputs(count: int = 6, side: float = 120.0) -> tuple[Any, ...]:
    """As `reduce` returns them: boxes within the image's part of the input, smooth prototypes."""
    random = np.random.default_rng(0)
    noise = random.normal(size=(32, 160, 160)).astype(np.float32)
    prototypes = np.stack([cv2.GaussianBlur(each, (0, 0), 6) for each in noise])
    centres = random.uniform((side / 2, 80 + side / 2), (640 - side / 2, 560 - side / 2), (count, 2))
    boxes = np.concatenate((centres - side / 2, centres + side / 2), axis=1).astype(np.float32)
    scores = np.linspace(0.9, 0.5, count).astype(np.float32)
    return (
        boxes,
        scores,
        np.arange(count, dtype=np.int32),
        random.normal(size=(count, 32)).astype(np.float32),
        prototypes,
    )


def detections(model: Any, form: str, **more: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = model.postprocess(
        outputs(),
        model.placement(640, 480),
        Options(masks=form, **more),  # type: ignore[arg-type]
    )["detections"]
    return found


def whole(mask: dict[str, Any]) -> Any:
    """Expand a PNG of a part to a mask of the whole image."""
    part = cv2.imdecode(np.frombuffer(base64.b64decode(mask["png"]), np.uint8), cv2.IMREAD_UNCHANGED)
    assert part is not None
    image = np.zeros(mask["size"], np.uint8)
    image[mask["y"] : mask["y"] + part.shape[0], mask["x"] : mask["x"] + part.shape[1]] = part > 0
    return image


def test_every_form_is_the_same_mask(model: Any) -> None:
    polygons, runs, images = (detections(model, form) for form in ("polygon", "rle", "png"))
    assert len(polygons) == len(runs) == len(images) == 6
    for polygon, run, image in zip(polygons, runs, images, strict=True):
        expected = whole(image["mask"])
        [counts] = compressed([run_lengths(expected, 0, 0, 640, 480)])
        assert run["mask"] == {"size": [480, 640], "counts": counts}
        filled = np.zeros((480, 640), np.uint8)
        rings = [np.array(ring, np.int32) for ring in polygon["segments"]]
        cv2.drawContours(filled, rings, -1, 1, cv2.FILLED)
        # Outlines lose holes, and the smallest parts.
        assert (filled & expected).sum() >= 0.97 * expected.sum()
        assert polygon["box"] == run["box"] == image["box"]


def test_boxes_under_the_least_area_are_left_out_with_what_belongs_to_them(model: Any) -> None:
    boxes, *others = outputs()
    boxes[::2, 2:] = boxes[::2, :2] + 30  # The image is not scaled: 900 pixels.
    placement = model.placement(640, 480)

    def found(**more: Any) -> list[dict[str, Any]]:
        entries: list[dict[str, Any]] = model.postprocess((boxes, *others), placement, Options(**more))["detections"]
        return entries

    assert found(min_area=899.0) == found()
    assert [each["class_id"] for each in found(min_area=901.0)] == [1, 3, 5]
    assert found(min_area=901.0) == [each for each in found() if each["class_id"] % 2]
    tensors = model.tensors((boxes, *others), placement, Options(min_area=901.0))
    assert (tensors["num_detections"], len(tensors["masks"]), tensors["classes"].tolist()) == (3, 3, [1, 3, 5])
    assert found(min_area=1e9) == []


def test_only_so_many_pixels_of_masks_are_looked_at(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment, "_MASK_PIXELS", 3 * 125 * 125)
    found = detections(model, "rle")
    assert [each["mask"] is None for each in found] == [False] * 3 + [True] * 3
