"""Embeddings, semantic segmentation, depth and regression: which outputs they take, and what they answer."""

from __future__ import annotations

import base64
import json
from typing import Any

import cv2
import numpy as np
import pytest
import torch

from models import Options, Placement
from models.contract.resize import Whole
from models.contract.task_adapter import AdaptedFile, TaskAdapter, task_class
from tests.support.task_files import SIDE, answers

SQUARE = Placement(100, 100)
LETTERBOXED = Whole((SIDE, SIDE)).placement(128, 64)


def task(
    name: str, *shapes: tuple[int, ...], labels: tuple[str, ...] = (), how: Any = "stretch", **options: Any
) -> Any:
    file = AdaptedFile(Whole((SIDE, SIDE), how), labels, shapes, json.dumps(options))
    return task_class(name)(file)


def asked(adapter: TaskAdapter, *outputs: torch.Tensor, placement: Placement = SQUARE, **options: Any) -> Any:
    """Return the answer to the first image of a batch."""
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


@pytest.mark.parametrize(
    ("shapes", "options", "words"),
    [
        ([(1, 5, 3)], {}, r"output 0 is \[1, 5, 3\]: .*pooling.* must be cls or mean"),
        ([(1, 3, 4, 4)], {"pooling": "cls"}, "must be mean"),
        ([(1, 3)], {"pooling": "mean"}, "must be left out"),
        ([(1, 3)], {"output": 2}, "it has no output 2"),
        ([(1, 3)], {"poling": "cls"}, "there is no option 'poling' of it; there is output, pooling"),
    ],
)
def test_what_leaves_the_vector_open_is_refused(shapes: Any, options: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        task("embed", *shapes, **options)


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
        placement=LETTERBOXED,
        masks="none",
    )
    assert found == {"areas": [{"label": "class 1", "class_id": 1, "area": 128 * 64, "share": 1.0}]}


def test_a_large_images_map_is_reduced_and_its_areas_are_not() -> None:
    found = asked(semantic(), answers("segment_semantic")[None], placement=Placement(8000, 4000))
    assert found["class_map"]["size"] == [640, 1280]
    assert [each["area"] for each in found["areas"]] == [16_000_000, 16_000_000]


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


@pytest.mark.parametrize(
    ("shape", "labels", "words"),
    [((1, 7), (), "has an output"), ((1, 5, 8, 8), ("a", lambda a, b: b), "it has 5 classes, and there are 2 labels")],
)
def test_what_is_no_map_of_classes_is_refused(shape: Any, labels: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        task("segment_semantic", shape, labels=labels)


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
