"""Tasks: which outputs embeddings, semantic segmentation, depth and regression take and what they answer, what a
classifier's outputs become, where tiles lie, and what remains of their answers.
"""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from itertools import pairwise
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from models import Options, Placement
from models.contract.resize import Whole
from models.contract.task_adapter import AdaptedFile, TaskAdapter, made, task_class
from models.exports.layouts import decoded, interpret, scored
from models.exports.library_files import stated_in
from models.exports.metadata import Description
from models.tasks.classify import Classify
from models.tasks.tiles import Tiling, merged
from tests.support.task_files import SIDE, answers

SQUARE = Placement(100, 100)


def task(
    name: str, *shapes: tuple[int, ...], labels: tuple[str, ...] = (), how: Any = "stretch", **options: Any
) -> Any:
    file = AdaptedFile(Whole((SIDE, SIDE), how), labels, shapes, json.dumps(options))
    return task_class(name)(file)


def asked(adapter: TaskAdapter, *outputs: torch.Tensor, placement: Placement = SQUARE, **options: Any) -> Any:
    chosen = Options(**options)
    computed = [each.numpy() for each in adapter.compute(outputs)]
    [reduced, *_] = adapter.reduce_all(computed, [chosen])
    tensors = adapter.tensors(reduced, placement, chosen)
    for spec in adapter.answers:
        assert tensors[spec.name].shape == spec.shape[1:]
    return adapter.postprocess(reduced, placement, chosen)


def picture(encoded: str) -> Any:
    return cv2.imdecode(np.frombuffer(base64.b64decode(encoded), np.uint8), cv2.IMREAD_UNCHANGED)


# --- embed ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shapes", "options", "wanted"),
    [
        ([(2, 5, 3), (2, 3)], {}, lambda a, b: b),
        ([(2, 5, 3), (2, 3)], {"pooling": "cls"}, lambda a, b: a[:, 0]),
        ([(2, 5, 3), (2, 3)], {"pooling": "mean"}, lambda a, b: a.mean(1)),
        ([(2, 3), (2, 3)], {"output": 1}, lambda a, b: b),
        ([(2, 3, 4, 4), (2, 2, 2)], {"pooling": "mean"}, lambda a, b: a.mean((2, 3))),
        ([(2, 3, 1, 1), (2, 2, 2)], {}, lambda a, b: a[:, :, 0, 0]),
    ],
)
def test_tokens_and_places_are_pooled_on_the_device(shapes: Any, options: Any, wanted: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(shape, generator=generator) for shape in shapes)
    adapter = task("embed", *[(1, *shape[1:]) for shape in shapes], **options)
    [vector] = adapter.compute([a, b])
    assert torch.allclose(vector, wanted(a, b))
    assert adapter.answers[0].shape == (-1, 3)


# --- segment_semantic -------------------------------------------------------------------------------------------------


def semantic(**more: Any) -> Any:
    return task("segment_semantic", (1, 2, 16, 16), labels=("nothing", "thing"), **more)


def test_classes_have_areas_and_a_map_of_the_images_size() -> None:
    found = asked(semantic(), answers("segment_semantic")[None], placement=Placement(200, 100))
    assert found["areas"] == [
        {"label": "nothing", "class_id": 0, "area": 10_000, "share": 0.5},
        {"label": "thing", "class_id": 1, "area": 10_000, "share": 0.5},
    ]
    assert found["class_map"]["size"] == [100, 200]
    levels = picture(found["class_map"]["png"])
    assert levels.shape == (100, 200)
    assert (levels[:, :100] == 0).all()
    assert (levels[:, 100:] == 1).all()


def test_scores_are_brought_to_the_inputs_size_before_the_best_is_chosen() -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(2, 5, 16, 16, generator=generator)
    classes, best = task("segment_semantic", (1, 5, 16, 16)).compute([scores])
    upsampled = torch.nn.functional.interpolate(scores, (SIDE, SIDE), mode="bilinear")
    assert torch.equal(classes, upsampled.argmax(1).int())
    assert best.shape == classes.shape
    assert bool(((best > 0.2) & (best <= 1)).all())


def test_the_padding_is_no_part_of_the_image() -> None:
    scores = torch.zeros(1, 2, SIDE, SIDE)
    scores[:, 1, 16:48] = 1  # A letterboxed image of twice its height in width lies there.
    found = asked(
        task("segment_semantic", (1, 2, SIDE, SIDE), how="letterbox"),
        scores,
        placement=Whole((SIDE, SIDE)).placement(128, 64),
        masks="none",
    )
    assert found == {"areas": [{"label": "class 1", "class_id": 1, "area": 128 * 64, "share": 1.0}]}


@pytest.mark.parametrize("scores", ["logits", "probabilities"])
def test_one_channel_is_the_only_class_beside_the_background(scores: str) -> None:
    levels = torch.full((1, 1, SIDE, SIDE), 0.2)
    levels[..., 32:] = 0.8
    adapter = task("segment_semantic", (1, 1, SIDE, SIDE), labels=("road",), scores=scores)
    found = asked(adapter, levels if scores == "probabilities" else levels.logit(), masks="none")
    assert [(each["label"], each["share"]) for each in found["areas"]] == [("background", 0.5), ("road", 0.5)]


def test_a_map_of_classes_is_one_already() -> None:
    classes = torch.zeros(1, 32, 32, dtype=torch.int64)
    classes[:, :8] = 300
    found = asked(task("segment_semantic", (1, 32, 32)), classes)
    assert [(each["label"], each["share"]) for each in found["areas"]] == [("class 0", 0.75), ("class 300", 0.25)]
    assert picture(found["class_map"]["png"]).dtype == np.uint16
    larger = asked(task("segment_semantic", (1, 32, 32)), classes, placement=Placement(50, 50))["class_map"]["png"]
    rows = torch.nn.functional.interpolate(classes[None].float(), 50)[
        0, 0, :, 0
    ]  # As Ultralytics resizes class numbers.
    assert picture(larger)[:, 0].tolist() == rows.tolist()


# --- depth and regress ------------------------------------------------------------------------------------------------


def test_depth_is_a_png_with_its_range_or_the_networks_own_numbers() -> None:
    adapter, ramp = task("depth", (1, 1, SIDE, SIDE)), answers("depth")[None]
    found = asked(adapter, ramp)["depth"]
    assert (found["size"], found["min"], found["max"]) == ([SIDE, SIDE], 1.0, 5.0)
    levels = picture(found["png"])
    assert levels.dtype == np.uint16
    np.testing.assert_allclose(1 + levels / 65_535 * 4, ramp[0, 0], atol=4 / 65_535)
    found = asked(adapter, ramp, encoding="base64")["depth"]
    numbers = np.frombuffer(base64.b64decode(found["float32"]), "<f4").reshape(found["size"])
    assert np.array_equal(numbers, ramp[0, 0])


def test_numbers_have_names() -> None:
    values = torch.tensor([[31.5, 1.75]])
    assert asked(task("regress", (1, 2), labels=("age", "height")), values) == {"values": {"age": 31.5, "height": 1.75}}
    two = values[:, :1], values[:, 1]
    assert asked(task("regress", (1, 1), (1,)), *two) == {"values": {"value 0": 31.5, "value 1": 1.75}}
    assert asked(task("regress", (1, 1)), two[0]) == {"values": {"value": 31.5}}
    with pytest.raises(ValueError, match="it answers with 3 numbers, and there are 1 labels"):
        task("regress", (1, 3), labels=("age",))
    with pytest.raises(ValueError, match="two numbers have the label 'age'"):
        task("regress", (1, 3), labels=("age", "height", "age"))


PLACE = Placement(64, 64)


def classify(labels: int, scores: str = "softmax") -> Classify:
    names = tuple(f"class {number}" for number in range(labels))
    return Classify(AdaptedFile(Whole((64, 64)), names, ((1, labels),), json.dumps({"scores": scores})))


def answered(adapter: Classify, logits: Any, count: int = 1, **options: Any) -> Any:
    """Of the first of `count` images with these logits."""
    chosen = Options(**options)
    batch = np.tile(np.array(logits, np.float32), (count, 1))
    answer = adapter.postprocess(adapter.reduce_all([batch], [chosen] * count)[0], PLACE, chosen)
    assert [answer] * count == adapter.postprocess_all([(row,) for row in batch], [PLACE] * count, chosen)
    return [(each["class_id"], each["score"]) for each in answer["classes"]]


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("tensors", [False, True])
def test_scores_of_their_own_are_sigmoids(count: int, tensors: bool) -> None:
    adapter = classify(3, "sigmoid")
    found = answered(adapter, [3.0, 2.0, -2.0], count, tensors=tensors)
    assert [class_id for class_id, _ in found] == [0, 1, 2]
    assert [score for _, score in found] == pytest.approx([0.95257, 0.8808, 0.1192], abs=1e-5)


# What the trial sees


def test_the_only_class_of_a_network_has_a_sigmoid_whatever_is_said() -> None:
    assert answered(classify(1), [-1.5]) == [(0, pytest.approx(0.18243, abs=1e-5))]
    assert classify(1).scored_by == "sigmoid"
    assert classify(2).scored_by == "softmax"


def read(outputs: Any, stated: Any = None, labels: int = 0) -> Any:
    """Read an output: the first image's scores, True if each class has its own sigmoid, and the note about it."""
    raw = torch.tensor(outputs)
    names = tuple(map(str, range(labels))) or None
    about = Description(task="classify", takes="classes", scores=stated, labels=names)
    how, note = scored(interpret(about, [(1, raw.shape[1])], (64, 64)), stated, raw)
    [logits] = decoded(how, [raw], (64, 64))
    adapter = classify(how.classes, "sigmoid" if how.each else "softmax")
    return adapter.scores(logits.numpy())[0].tolist(), how.each, note


@pytest.mark.parametrize("stated", [None, "probabilities"])
def test_probabilities_in_percent_are_answered_as_shares_of_one(stated: Any) -> None:
    scores, each, note = read([[97.6, 1.6, 0.8], [30.0, 30.0, 40.0]], stated)
    assert scores == pytest.approx([0.976, 0.016, 0.008], abs=1e-6)
    assert not each
    assert "have one sum, 100" in note


def test_probabilities_as_bytes_are_answered_as_shares_of_one() -> None:
    """As a phone's classifier gives them: softmax times 255, rounded."""
    scores, each, note = read([[14.0, 117.0, 110.0, 15.0], [0.0, 255.0, 0.0, 0.0]])
    assert scores == pytest.approx([0.0547, 0.457, 0.4297, 0.0586], abs=1e-4)
    assert not each
    assert "have one sum, 255" in note
    softmax, _, note = read([[14.0, 117.0, 110.0, 15.0], [0.0, 155.0, 0.0, 0.0]], "logits")
    assert (softmax[1], note) == (pytest.approx(0.9991, abs=1e-4), "")


def test_what_is_stated_holds_where_it_can() -> None:
    inside = [[0.9, 0.1], [0.5, 0.5]]
    assert "not those of a last layer" in read([[2.0, -1.0]])[2]
    scores, _, note = read(inside, "logits")
    assert scores == pytest.approx([0.68997, 0.31003], abs=1e-5)
    assert "softmax is done once more" in note
    assert read(inside, "probabilities") == (pytest.approx([0.9, 0.1], abs=1e-6), False, "")
    assert read([[0.9, 0.4]], "probabilities") == (pytest.approx([0.9, 0.4], abs=1e-6), True, "")
    assert read([[0.9, 0.4]], "sigmoid") == (pytest.approx([0.9, 0.4], abs=1e-6), True, "")
    assert read([[2.0, -1.0]], "sigmoid") == (pytest.approx([0.8808, 0.26894], abs=1e-5), True, "")
    for stated in (None, "sigmoid", "probabilities"):
        with pytest.raises(ValueError, match='divide them by 255 in the network, or state "scores": "logits"'):
            read([[70.0, 255.0], [0.0, 9.0]], stated)
    with pytest.raises(ValueError, match='-1 to 2, which are no "probabilities"'):
        read([[2.0, -1.0]], "probabilities")


@pytest.mark.parametrize(
    ("problem", "task", "scores"),
    [
        (None, "classify", None),
        ("single_label_classification", "classify", None),
        ("multi_label_classification", "classify", "sigmoid"),
        ("regression", "regress", None),
    ],
)
def test_the_problem_type_of_hugging_face_is_read(tmp_path: Any, problem: Any, task: str, scores: Any) -> None:
    config = {"model_type": "vit", "architectures": ["ViTForImageClassification"], "problem_type": problem}
    stated = stated_in(tmp_path, config, own={"mean", "std"})
    assert (stated["task"], stated.get("scores")) == (task, scores)


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
