"""What the gate measures of each task: a network that computes something else is refused, ties are no errors."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from models.contract.model import Options
from models.contract.resize import Whole
from models.contract.task_adapter import OWN, AdaptedFile, task_class

SIDE = 64
TASKS = [entry.name for entry in OWN]
OPTIONS: dict[str, Any] = {"pose": {"keypoints": [3, 3]}}
SHAPES: dict[str, tuple[tuple[int, ...], ...]] = {
    "embed": ((1, 32),),
    "regress": ((1, 3),),
    "depth": ((1, 1, 8, 8),),
    "segment_semantic": ((1, 5, 8, 8),),
}
HEADS = {"classify": 10, "embed": 32, "regress": 3, "depth": 1, "segment_semantic": 5}
CLASSES = 5
EXTRAS = {"detect": 0, "segment": 4, "pose": 9, "obb": 1}


def task(name: str, *, suppressed: bool = False) -> Any:
    options = json.dumps(OPTIONS.get(name, {}))
    file = AdaptedFile(Whole((SIDE, SIDE), "stretch"), (), SHAPES.get(name, ()), options, suppressed=suppressed)
    return task_class(name)(file)


class Network(nn.Module):
    """Two layers before the head of a task; its outputs are spread as those of a trained network are."""

    def __init__(self, name: str) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.name = name
        self.first, self.second = nn.Conv2d(3, 16, 8, 8), nn.Conv2d(16, 16, 3, padding=1)
        self.head = nn.Conv2d(16, HEADS.get(name) or 4 + CLASSES + EXTRAS[name], 1)
        for layer in (self.first, self.second, self.head):
            nn.init.normal_(layer.weight, std=2 / (layer.weight[0].numel() ** 0.5))
        self.lost = False

    def forward(self, images: torch.Tensor) -> list[torch.Tensor]:
        features = self.first(images).relu()
        if not self.lost:
            features = self.second(features).relu()
        raw: torch.Tensor = self.head(features)
        adapter = task(self.name)
        if self.name in ("classify", "embed", "regress"):
            raw = 20 * raw.mean((2, 3))
            return [raw] if self.name == "classify" else list(adapter.compute([raw]))
        if self.name in HEADS:
            return list(adapter.compute([4 * raw]))
        rows = raw.flatten(2).transpose(1, 2)
        y, x = torch.meshgrid(torch.arange(8) * 8 + 4.0, torch.arange(8) * 8 + 4.0, indexing="ij")
        centres = torch.stack((x, y), dim=2).reshape(-1, 2) + 4 * rows[..., :2].tanh()
        sides = 16 + 8 * rows[..., 2:4].tanh()
        boxes = torch.cat((centres, sides) if self.name == "obb" else (centres - sides / 2, centres + sides / 2), dim=2)
        best, classes = rows[..., 4 : 4 + CLASSES].max(dim=2)
        extras = rows[..., 4 + CLASSES :]
        found = [boxes, (best - 3).sigmoid(), classes.int(), *([extras] if EXTRAS[self.name] else [])]
        return [*found, raw[:, :4]] if self.name == "segment" else found


def outputs_of(network: Network) -> list[Any]:
    images = torch.rand(8, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(0))
    images *= torch.linspace(0.2, 2, 8).reshape(-1, 1, 1, 1)
    with torch.inference_mode():
        return [each.numpy() for each in network(images)]


@functools.cache
def right(name: str) -> list[Any]:
    return outputs_of(Network(name))


def a_layer_is_lost(network: Network) -> None:
    network.lost = True


def products_are_wrong(network: Network) -> None:
    network.second.weight.data = network.second.weight.data.flip(1)


def too_much(network: Network) -> None:
    network.head.weight.data *= 1.1
    assert network.head.bias is not None
    network.head.bias.data *= 1.1


def swapped(network: Network) -> None:
    """Two classes, values or numbers of a vector; of the only channel of depth, right and left."""
    weight, first = network.head.weight.data, 4 if network.name in EXTRAS else 0
    if network.name == "depth":
        network.first.weight.data = network.first.weight.data.flip(3)
        return
    bias = network.head.bias
    assert bias is not None
    for each in (weight, bias.data):
        each[[first, first + 1]] = each[[first + 1, first]]


def shifted(network: Network) -> None:
    network.second.weight.data = network.second.weight.data.roll(1, dims=3)


def refused(adapter: Any, expected: Any, outputs: Any, precision: str) -> list[str]:
    found = adapter.measures(expected, outputs)
    return [name for name, limit in adapter.limits[precision].items() if not found[name] <= limit]


FAULTS = (a_layer_is_lost, products_are_wrong, too_much, swapped, shifted)
WITHIN_ROUNDING = ("detect", "pose", "segment_semantic")
"""Of these a tenth more before a sigmoid or softmax moves no class, and no score by more than bf16 may."""


@pytest.mark.parametrize(
    ("name", "fault", "precision"),
    [
        (name, fault, precision)
        for name in TASKS
        for fault in FAULTS
        for precision in ("fp32", "bf16")
        if (fault, precision) != (too_much, "bf16") or name not in WITHIN_ROUNDING
    ],
)
def test_a_network_that_computes_something_else_is_refused(
    name: str, fault: Callable[[Network], None], precision: str
) -> None:
    adapter, network, expected = task(name), Network(name), right(name)
    fault(network)
    assert refused(adapter, expected, outputs_of(network), precision)


@pytest.mark.parametrize("name", TASKS)
def test_rounding_is_no_error(name: str) -> None:
    adapter, expected = task(name), right(name)
    assert not refused(adapter, expected, expected, "fp32")
    random = np.random.default_rng(0)
    for precision, size in (("fp32", 1e-6), ("bf16", 1e-3)):
        noisy = [
            each * (1 + size * random.standard_normal(each.shape)).astype(np.float32)
            if each.dtype.kind == "f"
            else each
            for each in expected
        ]
        assert not refused(adapter, expected, noisy, precision)


# --- networks that suppress by themselves: rows are sets --------------------------------------------------------------

ROWS = 300


def rows_of(random: np.random.Generator, count: int, *, filled: bool = False) -> list[Any]:
    """Boxes [1, 300, 4], scores and classes: objects in places of their own, scores apart as trained ones are.

    `filled`: rows after these are of low scores, else of zeros.
    """
    cells = random.permutation(ROWS)
    corners = np.stack((cells % 20 * 64, cells // 20 * 64), axis=1) + random.uniform(0, 8, (ROWS, 2))
    boxes = np.concatenate((corners, corners + random.uniform(24, 48, (ROWS, 2))), axis=1).astype(np.float32)
    scores = np.concatenate((np.linspace(0.95, 0.3, count), np.linspace(0.05, 0.01, ROWS - count))).astype(np.float32)
    classes = random.integers(0, CLASSES, ROWS).astype(np.int32)
    if not filled:
        boxes[count:], scores[count:], classes[count:] = 0, 0, 0
    return [boxes[None], scores[None], classes[None]]


def of_sets(expected: Any, outputs: Any, precision: str = "fp32") -> list[str]:
    file = AdaptedFile(Whole((1280, 1280), "stretch"), (), suppressed=True)
    return refused(task_class("detect")(file), expected, outputs, precision)


def copied(rows: Any) -> list[Any]:
    return [each.copy() for each in rows]


SEEDS = st.integers(0, 2**32 - 1)
COUNTS = st.integers(2, 60)
few = settings(max_examples=25, deadline=None)


@few
@given(SEEDS, COUNTS)
def test_masks_that_are_prototypes_are_compared_whatever_their_numbers(seed: int, count: int) -> None:
    random = np.random.default_rng(seed)
    file = AdaptedFile(Whole((1280, 1280), "stretch"), (), suppressed=True)
    adapter, rows = task_class("segment")(file), rows_of(random, count)
    masks, own = random.standard_normal((1, ROWS, 8, 8)).astype(np.float32), np.eye(ROWS, dtype=np.float32)
    expected, order, numbers = [*rows, own[None], masks], random.permutation(ROWS), random.permutation(ROWS)
    outputs = [*(each[:, order] for each in rows), own[order][None, :, numbers], masks[:, numbers]]
    assert not refused(adapter, expected, outputs, "fp32")
    exchanged = masks.copy()
    exchanged[:, [0, 1]] = masks[:, [1, 0]]
    assert refused(adapter, expected, [*rows, own[None], exchanged], "bf16") == ["extra"]
    reduced = adapter.reduce([each[0] for each in expected], Options(score_threshold=0.25))
    assert [len(each) for each in reduced] == [count] * 5


@few
@given(SEEDS, COUNTS, st.booleans())
def test_the_order_of_rows_is_no_error(seed: int, count: int, filled: bool) -> None:
    random = np.random.default_rng(seed)
    expected = rows_of(random, count, filled=filled)
    order = random.permutation(ROWS)
    outputs = [each[:, order] for each in expected]
    outputs[1] = outputs[1] * np.float32(1 + 1e-4)
    assert not of_sets(expected, outputs)


@few
@given(SEEDS, COUNTS)
def test_who_is_at_the_networks_own_threshold_may_be_lacking(seed: int, count: int) -> None:
    random = np.random.default_rng(seed)
    expected = rows_of(random, count)
    outputs = copied(expected)
    for each in outputs:
        each[:, count - 1] = 0
    assert not of_sets(expected, outputs)
    assert not of_sets(outputs, expected)


@few
@given(SEEDS)
def test_who_is_at_the_cut_may_be_another(seed: int) -> None:
    random = np.random.default_rng(seed)
    expected = rows_of(random, ROWS)
    expected[1][0] = np.linspace(0.9, 0.5, ROWS, dtype=np.float32)
    outputs = copied(expected)
    outputs[0][0, -1] += 3_000
    assert not of_sets(expected, outputs)


@few
@given(SEEDS, COUNTS, st.floats(0.35, 0.6))
def test_who_lies_upon_a_better_one_may_be_lacking(seed: int, count: int, moved: float) -> None:
    random = np.random.default_rng(seed)
    expected = rows_of(random, count)
    # A second box of the first object, whose overlap is about a threshold of suppression.
    width = expected[0][0, 0, 2] - expected[0][0, 0, 0]
    expected[0][0, 1] = expected[0][0, 0] + np.array([moved / 2 * width, 0, moved / 2 * width, 0], np.float32)
    expected[2][0, 1] = expected[2][0, 0]
    outputs = copied(expected)
    for each in outputs:
        each[:, 1] = 0
    assert not of_sets(expected, outputs)
    assert not of_sets(outputs, expected)


@few
@given(SEEDS, st.integers(3, 40), st.booleans(), st.sampled_from(["moved", "class", "score", "lacking", "more"]))
def test_one_row_that_is_wrong_is_refused(seed: int, count: int, filled: bool, fault: str) -> None:
    random = np.random.default_rng(seed)
    expected = rows_of(random, count, filled=filled)
    outputs, row = copied(expected), int(random.integers(0, max(1, (count - 1) // 2)))
    if fault == "moved":
        outputs[0][0, row] += 28
    elif fault == "class":
        outputs[2][0, row] += 1
    elif fault == "score":
        outputs[1][0, row] -= 0.2
    elif fault == "lacking":
        for each in outputs:
            each[:, row] = 0
    else:
        outputs[0][0, -1], outputs[1][0, -1], outputs[2][0, -1] = (1300, 1300, 1340, 1340), 0.8, 1
    assert of_sets(expected, outputs)


# --- candidates of which suppression is ours --------------------------------------------------------------------------


def candidates(boxes: Any, scores: Any) -> list[Any]:
    return [np.array([boxes], np.float32), np.array([scores], np.float32), np.zeros((1, len(scores)), np.int32)]


def missed(expected: Any, outputs: Any) -> float:
    file = AdaptedFile(Whole((1280, 1280), "stretch"), ())
    found: float = task_class("detect")(file).measures(expected, outputs)["missed"]
    return found


def test_whom_suppression_drops_is_no_matter_of_the_network() -> None:
    first, second = (100, 100, 200, 200), (114, 100, 214, 200)  # They overlap by 0.75, more than 0.7.
    one, other = candidates([first, second], [0.9, 0.8999]), candidates([first, second], [0.8999, 0.9])
    assert missed(one, other) == 0
    third = (117.6, 100, 217.6, 200)  # By 0.7 and a little less.
    assert missed(candidates([first, third], [0.9, 0.8]), candidates([first, np.add(third, -0.1)], [0.9, 0.8])) == 0
    assert missed(one, candidates([first, np.add(second, 400)], [0.9, 0.8999])) > 0


def test_whom_the_cut_drops_is_no_matter_of_the_network() -> None:
    places = [(x * 30, y * 30, x * 30 + 20, y * 30 + 20) for x in range(20) for y in range(20)]
    scores = np.full(400, 0.8) + np.linspace(0, 1e-5, 400)
    assert missed(candidates(places, scores), candidates(places, scores[::-1])) == 0


def test_a_score_about_the_threshold_does_not_decide() -> None:
    place = [(100, 100, 200, 200)]
    assert missed(candidates(place, [0.401]), candidates(place, [0.399])) == 0
    assert missed(candidates(place, [0.401]), candidates(place, [0.1])) == 1
