"""models.onnx.torchvision_detectors: how its detectors are told, and what is made of as many boxes as an image has."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from models.exports.layouts import Interpretation, decoded
from models.onnx.file import Node, OnnxFile, Value
from models.onnx.torchvision_detectors import MOST_DETECTIONS, as_detector, only_float32, untraced

HOW = Interpretation("boxes", "torchvision", 0, 0, True)


@pytest.mark.parametrize("count", [0, 1, 299, 300, 301, 900])
def test_the_best_are_answered_and_the_rest_filled_up_with_nothing(count: int) -> None:
    random = torch.Generator().manual_seed(count)
    scores = torch.rand(count, generator=random) * 0.9 + 0.05
    boxes, labels = torch.rand((count, 4), generator=random), torch.randint(1, 91, (count,), generator=random)
    found, values, classes = decoded(HOW, [boxes, scores, labels], (64, 64))
    assert [tuple(each.shape) for each in (found, values, classes)] == [(1, 300, 4), (1, 300), (1, 300)]
    kept = min(count, MOST_DETECTIONS)
    order = scores.sort(descending=True, stable=True).indices[:kept]
    assert torch.equal(values[0, :kept], scores[order])
    assert torch.equal(found[0, :kept], boxes[order])
    assert torch.equal(classes[0, :kept], labels[order].int())
    assert not values[0, kept:].any()


def value(name: str, shape: tuple[Any, ...], kind: str = "<f4") -> Value:
    return Value(name, np.dtype(kind), shape)


IMAGE = (value("image", (3, 240, 320)),)
OUTPUTS = (value("b", ("k", 4)), value("l", ("k",), "<i8"), value("s", ("k",)))


@pytest.mark.parametrize(
    ("inputs", "outputs", "told"),
    [
        (IMAGE, OUTPUTS, True),
        (IMAGE, (*OUTPUTS, value("masks", ("k", 1, 240, 320))), True),
        (IMAGE, (*OUTPUTS, value("points", ("k", 17, 3)), value("point scores", ("k", 17))), True),
        ((value("image", (1, 3, 240, 320)),), OUTPUTS, False),
        ((*IMAGE, value("more", (1,))), OUTPUTS, False),
        (IMAGE, OUTPUTS[:2], False),
        (IMAGE, (value("b", (5, 4)), value("l", (5,), "<i8"), value("s", (5,))), False),
        (IMAGE, (value("b", ("k", 4)), value("l", ("k",)), value("s", ("k",))), False),
    ],
)
def test_it_is_told_by_its_input_and_outputs(inputs: tuple[Value, ...], outputs: tuple[Value, ...], told: bool) -> None:
    found = as_detector(OnnxFile(opset=17, inputs=inputs, outputs=outputs))
    assert (found is not None) == told
    if found is not None:
        assert [each.name for each in found.outputs] == ["b", "s", "l"]


def guarded(**changes: Any) -> OnnxFile:
    """Build a file that checks for boxes before it suppresses, as torchvision's are exported."""
    nothing = OnnxFile(
        nodes=[Node("Constant", (), ("none",), {"value": np.zeros(0, np.int64)})], outputs=(value("none", ("k",)),)
    )
    something = OnnxFile(
        nodes=[Node("NonMaxSuppression", ("b", "s"), ("kept",), {})],
        constants={"inner": np.ones(1, np.float32)},
        outputs=(value("kept", ("k",)),),
    )
    branches = {"then_branch": nothing, "else_branch": something, **changes}
    nodes = [
        Node("Shape", ("b",), ("shape",), {}),
        Node("ReduceProd", ("shape",), ("count",), {}),
        Node("Equal", ("count", "zero"), ("equal",), {}),
        Node("Cast", ("equal",), ("asked",), {"to": 9}),
        Node("If", ("asked",), ("l",), branches),
        Node("Loop", ("x",), ("masks",), {}),
    ]
    return OnnxFile(opset=17, nodes=nodes, inputs=IMAGE, outputs=(*OUTPUTS, value("masks", ("k", 1, 9, 9))))


def test_a_question_whether_there_are_boxes_is_left_out_and_so_are_masks() -> None:
    found = as_detector(guarded())
    assert found is not None
    assert [(node.operator, node.outputs) for node in found.nodes] == [("NonMaxSuppression", ("l",))]
    assert "inner" in found.constants


@pytest.mark.parametrize(
    "changes",
    [
        {"then_branch": OnnxFile(nodes=[Node("Constant", (), ("none",), {"value": np.ones(1, np.int64)})])},
        {"else_branch": OnnxFile(nodes=[Node("Add", ("b", "s"), ("kept",), {})], outputs=(value("kept", ("k",)),))},
        {"then_branch": None},
        {"else_branch": "text"},
    ],
)
def test_another_question_stays(changes: dict[str, Any]) -> None:
    found = as_detector(guarded(**changes))
    assert found is not None
    assert "If" in [node.operator for node in found.nodes]


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_nobody_writes_such_a_network_down_and_it_is_float32() -> None:
    with pytest.raises(RuntimeError, match="only the eager engine"):
        torch.jit.trace(untraced, torch.zeros(1))
    assert torch.equal(untraced(torch.ones(1)), torch.ones(1))
    assert only_float32(torch.float32) is torch.float32
    with pytest.raises(RuntimeError, match="float32"):
        only_float32(torch.bfloat16)
