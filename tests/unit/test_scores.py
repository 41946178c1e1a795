"""What a classifier's outputs become: softmax, a sigmoid each, or nothing where the network has done it."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch

from models import Options, Placement
from models.contract.resize import Whole
from models.contract.task_adapter import AdaptedFile
from models.exports.layouts import decoded, interpret, scored
from models.exports.library_files import stated_in
from models.exports.metadata import Description
from models.tasks.classify import Classify

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


def test_more_classes_than_are_found_one_by_one_have_sigmoids_too() -> None:
    logits = np.linspace(-5, 5, 100)
    found = answered(classify(100, "sigmoid"), logits, top_k=50)
    assert [score for _, score in found] == pytest.approx((1 / (1 + np.exp(-logits)))[::-1][:50], abs=1e-5)


def test_the_only_class_of_a_network_has_a_sigmoid_whatever_is_said() -> None:
    assert answered(classify(1), [-1.5]) == [(0, pytest.approx(0.18243, abs=1e-5))]
    assert classify(1).scored_by == "sigmoid"
    assert classify(2).scored_by == "softmax"


def test_a_sigmoid_of_large_logits_is_no_overflow() -> None:
    scores = classify(4, "sigmoid").scores(np.array([-1e4, 1e4, -np.inf, np.nan], np.float32))
    assert scores[:3].tolist() == [0, 1, 0]
    assert np.isnan(scores[3])


def test_tensors_have_the_scores_too() -> None:
    adapter = classify(2, "sigmoid")
    found = adapter.tensors([np.array([0.0, 3.0], np.float32)], PLACE, Options(tensors=True))
    assert found["probabilities"].tolist() == pytest.approx([0.5, 0.95257], abs=1e-5)


# What the trial sees


@pytest.mark.parametrize("shape", [(1, 5), (1, 1, 5), (1, 5, 1, 1), (1, 1, 1, 5)])
def test_axes_of_one_beside_the_classes_are_none(shape: tuple[int, ...]) -> None:
    about = Description(task="classify", takes="classes")
    assert interpret(about, [shape], (64, 64)).classes == 5
    with pytest.raises(ValueError, match="export it with its scores alone"):
        interpret(about, [shape, shape], (64, 64))


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
    assert "in percent" in note


def test_what_is_stated_holds_where_it_can() -> None:
    inside = [[0.9, 0.1], [0.5, 0.5]]
    scores, _, note = read(inside, "logits")
    assert scores == pytest.approx([0.68997, 0.31003], abs=1e-5)
    assert "softmax is done once more" in note
    assert read(inside, "probabilities") == (pytest.approx([0.9, 0.1], abs=1e-6), False, "")
    assert read([[0.9, 0.4]], "probabilities") == (pytest.approx([0.9, 0.4], abs=1e-6), True, "")
    assert read([[0.9, 0.4]], "sigmoid") == (pytest.approx([0.9, 0.4], abs=1e-6), True, "")
    assert read([[2.0, -1.0]], "sigmoid") == (pytest.approx([0.8808, 0.26894], abs=1e-5), True, "")
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
