"""models.yolo: names and shapes of the published weights, and the reference's letterbox and boxes."""

from __future__ import annotations

import itertools
import json
from typing import Any

import cv2
import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from models.contract.errors import WeightsError
from models.contract.model import Options, Placement
from models.weights.checkpoint import Checkpoint
from models.yolo.model import (
    ARCHITECTURES,
    FAMILIES,
    KINDS,
    MOST_ANCHORS,
    YOLO,
    architecture_of,
    fitted,
    named_in,
    parts_of,
)
from models.yolo.yolo11 import YOLO11
from models.yolo.yolov8 import SIZES, YOLOv8, anchors
from tests.support.networks import letterboxed

LABELS = tuple(f"class {index}" for index in range(12))
RANDOM = YOLO.of("random", "yolov8n", LABELS, "random", None)
CENTRES, STRIDES = (tensor.numpy() for tensor in anchors(640, 640))


# Labels and weights


def class_count(architecture: str, state: dict[str, Tensor]) -> int:
    return fitted(architecture, Checkpoint(state)).class_count


def test_weights_that_do_not_fit_are_refused_with_what_is_wrong() -> None:
    with torch.device("meta"):
        state = YOLOv8("n", 7).state_dict()
        odd = torch.empty(3)
    cases: list[tuple[str, dict[str, Tensor], str]] = [
        ("yolov8s", state, "are of yolov8n, not of yolov8s"),
        ("yolov8n", {"fc.weight": odd}, "not those of a YOLOv8 detector"),
        ("yolov8n", {**state, "model.22.cv4.0.2.bias": odd}, r"it has no model\.22\.cv4\.0\.2\.bias"),
        ("yolov8n", {**state, "model.9.cv1.bn.bias": odd}, r"model\.9\.cv1\.bn\.bias is \[3\], not \[128\]"),
        ("yolov8n", {k: v for k, v in state.items() if k != "model.1.bn.bias"}, "is missing"),
    ]
    for architecture, weights, message in cases:
        with pytest.raises(WeightsError, match=message):
            class_count(architecture, weights)


# Letterbox


@given(st.integers(1, 1500), st.integers(1, 1500), st.integers(0, 2**32 - 1))
@settings(max_examples=40, deadline=None)
def test_letterbox_is_the_reference_s(width: int, height: int, seed: int) -> None:
    scale = min(640 / height, 640 / width)
    new_width, new_height = round(width * scale), round(height * scale)
    assume(min(new_width, new_height) > 0)  # the reference cannot place such slivers
    image = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    found, placement = letterboxed(RANDOM, image)

    pad_x, pad_y = (640 - new_width) / 2, (640 - new_height) / 2
    left, right, top, bottom = round(pad_x - 0.1), round(pad_x + 0.1), round(pad_y - 0.1), round(pad_y + 0.1)
    resized = cv2.resize(image, (new_width, new_height), interpolation=cv2.INTER_LINEAR)
    expected = cv2.copyMakeBorder(resized, top, bottom, left, right, cv2.BORDER_CONSTANT, value=(114, 114, 114))
    assert (found.numpy() == expected).all()
    assert placement == Placement(width, height, scale, left, top)


# Boxes


def at_anchors(corners: Any, indices: Any) -> npt.NDArray[np.float32]:
    """Distances that put boxes [k, 4] (input pixels) at these anchors."""
    centres, strides = CENTRES[indices], STRIDES[indices, None]
    corners = np.asarray(corners, np.float64).reshape(-1, 4)
    distances = np.concatenate((centres - corners[:, :2] / strides, corners[:, 2:] / strides - centres), axis=1)
    return distances.astype(np.float32)


def outputs_of(count: int) -> list[npt.NDArray[Any]]:
    return [
        np.zeros((count, 8400, 4), np.float32),
        np.zeros((count, 8400), np.float32),
        np.zeros((count, 8400), np.int32),
        np.tile(np.arange(8400, dtype=np.int32), (count, 1)),
    ]


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_a_box_of_the_image_comes_back_from_the_input(data: st.DataObject) -> None:
    width, height = data.draw(st.integers(1, 12_000)), data.draw(st.integers(1, 12_000))
    xs = sorted(data.draw(st.lists(st.floats(0, width), min_size=2, max_size=2)))
    ys = sorted(data.draw(st.lists(st.floats(0, height), min_size=2, max_size=2)))
    index = data.draw(st.integers(0, 8399))
    # The placement is that of the whole image whatever is decoded of it: one pixel will do here.
    out = torch.empty(RANDOM.input_shape, dtype=torch.uint8)
    placement = RANDOM.preprocess(torch.zeros(1, 1, 3, dtype=torch.uint8), out, width, height)
    # As Ultralytics places boxes since 8.4: by the whole pixels that the image takes on each axis.
    across, down = (max(1, round(side * placement.scale)) / side for side in (width, height))
    x1, x2 = (x * across + placement.pad_x for x in xs)
    y1, y2 = (y * down + placement.pad_y for y in ys)

    outputs = outputs_of(2)
    outputs[0][1, index] = at_anchors([x1, y1, x2, y2], [index])[0]
    outputs[1][1, index], outputs[2][1, index] = 0.875, 11
    answer = RANDOM.postprocess(RANDOM.reduce(outputs, 1, Options()), placement, Options())
    (detection,) = answer["detections"]
    assert detection["label"] == "class 11"
    assert detection["class_id"] == 11
    assert detection["score"] == 0.875
    assert list(detection["box"]) == ["x1", "y1", "x2", "y2"]
    for found, expected in zip(detection["box"].values(), (xs[0], ys[0], xs[1], ys[1]), strict=True):
        assert abs(found - expected) <= 0.5
    assert (answer["width"], answer["height"]) == (width, height)
    assert json.loads(json.dumps(answer)) == answer


@given(
    st.integers(0, 2**32 - 1),
    st.integers(0, 200),
    st.floats(0, 1),
    st.floats(0, 1),
    st.integers(0, 60),
    st.tuples(st.integers(1, 3000), st.integers(1, 3000)),
)
@settings(max_examples=80, deadline=None)
def test_answers_are_sorted_and_bounded(
    seed: int, count: int, score_threshold: float, iou_threshold: float, limit: int, size: tuple[int, int]
) -> None:
    rng = np.random.default_rng(seed)
    options = Options(score_threshold=score_threshold, iou_threshold=iou_threshold, max_detections=limit)
    indices = rng.choice(8400, count, replace=False)
    corners = rng.uniform(-200, 840, (count, 2))
    corners = np.concatenate((corners, corners + rng.uniform(0, 500, (count, 2))), axis=1)
    outputs = outputs_of(1)
    outputs[0][0, indices] = at_anchors(corners, indices)
    outputs[1][0, indices] = rng.uniform(0, 1, count)
    outputs[2][0, indices] = rng.integers(0, 3, count)

    reduced = RANDOM.reduce(outputs, 0, options)
    assert [array.dtype for array in reduced] == [np.float32, np.float32, np.int32]
    assert len(reduced[1]) == (outputs[1] > score_threshold).sum()
    assert all(array.base is None for array in reduced)
    width, height = size
    placement = Placement(width, height, min(640 / width, 640 / height))
    found = RANDOM.postprocess(reduced, placement, options)["detections"]
    scores = [detection["score"] for detection in found]
    assert scores == sorted(scores, reverse=True)
    assert len(found) <= limit
    for detection in found:
        box = detection["box"]
        assert 0 <= box["x1"] <= box["x2"] <= width
        assert 0 <= box["y1"] <= box["y2"] <= height


def test_the_best_anchors_leave_the_device_and_the_answers_are_those_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    chance = torch.Generator().manual_seed(0)  # Of other pictures these weights may find nothing.
    squares = torch.randint(256, (2, 20, 20, 3), dtype=torch.uint8, generator=chance)
    pixels = squares.repeat_interleave(32, 1).repeat_interleave(32, 2)
    network = RANDOM.network()
    with torch.inference_mode():
        found = [each.numpy() for each in network(pixels)]
        monkeypatch.setattr("models.yolo.model.MOST_ANCHORS", 9000)
        every = [each.numpy() for each in network(pixels)]
    assert [each.shape for each in found] == [(2, MOST_ANCHORS, 4), *[(2, MOST_ANCHORS)] * 3]
    assert sum(each.nbytes for each in found) == 2 * MOST_ANCHORS * 28, "for 201,600 bytes an image of all anchors"
    found_some = False
    for row in (0, 1):
        assert sorted(every[3][row]) == list(range(8400))
        given, wanted = (
            RANDOM.postprocess(RANDOM.reduce(outputs, row, Options()), Placement(640, 640), Options())
            for outputs in (found, every)
        )
        assert given == wanted
        found_some = found_some or bool(given["detections"])
    assert found_some
    assert not any(RANDOM.errors(found, found).values())


def test_family_size_and_kind_are_told_from_the_state_dict() -> None:
    for family, size, kind in itertools.product(FAMILIES, SIZES, KINDS):
        name = f"{family.name.lower()}{size}{kind and '-'}{kind}"
        if name not in ARCHITECTURES:
            continue  # YOLO26's classifiers are YOLO11's.
        assert parts_of(name) == (family, size, kind)
        with torch.device("meta"):
            state = family.made(size, kind, 3).state_dict()
        assert family.detector.size_of(state) == size
        assert named_in(state, kind) == name
        assert architecture_of(state) == name
        assert class_count(name, state) == 3
    assert YOLO11.size_of({"model.0.conv.weight": torch.empty(17, 3, 3, 3)}) is None
    assert YOLO11.size_of({"model.0.conv.weight": torch.empty(())}) is None
    assert YOLO11.size_of({}) is None
