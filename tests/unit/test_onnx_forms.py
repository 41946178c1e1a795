"""Forms of ONNX's operators: those of older opsets mean what they meant, what is not computed is refused by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from models.contract.errors import WeightsError
from models.onnx.file import Node, OnnxFile, Value
from models.onnx.graph import OnnxGraph


def computed(
    operator: str, given: Any, *more: Any, opset: int = 18, outputs: tuple[str, ...] = ("y",), **attributes: Any
) -> Any:
    """Compute one node of a tensor and of constants; None stands for a constant that is left out."""
    constants = {f"c{number}": np.array(each) for number, each in enumerate(more) if each is not None}
    names = ["x", *("" if each is None else f"c{number}" for number, each in enumerate(more))]
    node = Node(operator, tuple(names), outputs, attributes)
    inputs, results = (Value("x", None, None),), tuple(Value(name, None, None) for name in outputs)
    graph = OnnxGraph(OnnxFile(opset, {}, [node], constants, inputs, results), "a.onnx")
    return graph(torch.tensor(given))[0]


@pytest.mark.parametrize("operator", ["Softmax", "LogSoftmax"])
@pytest.mark.parametrize("opset", [9, 11, 12])
def test_softmax_before_opset_13_is_over_all_numbers_from_its_axis_on(operator: str, opset: int) -> None:
    """As SqueezeNet ends: [n, classes, 1, 1] without an axis, which is 1; over the last one all are 1."""
    logits = torch.tensor([1.0, 2.0, -1.0]).reshape(1, 3, 1, 1)
    right = logits.flatten(1).softmax(1) if operator == "Softmax" else logits.flatten(1).log_softmax(1)
    found = computed(operator, logits.tolist(), opset=opset)
    assert found.shape == (1, 3, 1, 1)
    torch.testing.assert_close(found.flatten(1), right)
    torch.testing.assert_close(computed(operator, logits.tolist(), opset=13, axis=1).flatten(1), right)


def test_softmax_since_opset_13_is_over_its_axis() -> None:
    assert computed("Softmax", [[[0.0, 5.0]], [[1.0, 1.0]]], axis=0)[:, 0].sum(0).tolist() == pytest.approx([1, 1])
    assert computed("Softmax", [[1.0, 1.0]], opset=13).tolist() == [[0.5, 0.5]]


def test_reductions_over_no_axes_do_what_they_are_told() -> None:
    values = [[1.0, 2.0], [3.0, 4.0]]
    nothing = np.zeros(0, np.int64)
    assert computed("ReduceSum", values, nothing).tolist() == [[10]]
    assert computed("ReduceSum", values, nothing, noop_with_empty_axes=1).tolist() == values
    assert computed("ReduceL1", [[-1.0, 2.0]], nothing, noop_with_empty_axes=1).tolist() == [[1, 2]]
    assert computed("ReduceProd", values).tolist() == [[24]]
    assert computed("ReduceProd", values, keepdims=0).tolist() == 24
    assert computed("ReduceProd", values, axes=[0, -1], keepdims=0).tolist() == 24
    assert computed("ReduceProd", values, axes=[1], opset=13).tolist() == [[2], [12]]


def test_a_power_has_the_type_of_its_base() -> None:
    found = computed("Pow", [1, 2, 3], np.array([2.0, 0.5, 2.0], np.float32))
    assert (found.dtype, found.tolist()) == (torch.int64, [1, 1, 9])


# The right numbers are those of onnx.reference and of ONNX Runtime.
GRID = [[1.0, 2.0], [3.0, 4.0]]


@pytest.mark.parametrize("mode", ["nearest", "linear"])
@pytest.mark.parametrize(("operator", "opset"), [("Upsample", 9), ("Resize", 10)])
def test_before_opset_11_places_are_asymmetric(mode: str, operator: str, opset: int) -> None:
    found = computed(operator, [[[[0.0, 1.0, 2.0, 3.0]]]], np.array([1, 1, 1, 2], np.float32), opset=opset, mode=mode)
    right = [0, 0, 1, 1, 2, 2, 3, 3] if mode == "nearest" else [0, 0.5, 1, 1.5, 2, 2.5, 3, 3]
    assert found[0, 0, 0].tolist() == pytest.approx(right)


@pytest.mark.parametrize(
    ("operator", "inputs", "attributes", "said"),
    [
        ("Resize", (None, None, [1, 1, 1, 1]), {"mode": "linear", "antialias": 1}, "Resize with antialias"),
        ("Resize", (None, None, [1, 1, 4, 4]), {"keep_aspect_ratio_policy": "not_larger"}, "policy not_larger"),
        ("Resize", (None, None, [1, 1, 4, 4]), {"coordinate_transformation_mode": "tf_crop_and_resize"}, "tf_crop"),
        ("Resize", (None, None, [1, 1, 4, 4]), {"nearest_mode": "simple"}, "nearest_mode simple"),
        ("Resize", (None, None, [1, 2, 4, 4]), {}, "channels"),
        ("Relu", (), {"threshold": 0.5}, "Relu with threshold 0.5"),
        ("DequantizeLinear", (np.float32(1),), {"block_size": 2}, "DequantizeLinear with block_size 2"),
        ("MaxPool", (), {"kernel_shape": [1, 1], "storage_order": 1}, "storage_order 1"),
    ],
)
def test_what_is_not_computed_is_named(operator: str, inputs: Any, attributes: dict[str, Any], said: str) -> None:
    with pytest.raises(WeightsError, match=rf"^a\.onnx uses .*{said}.*, which is not computed here\.$"):
        computed(operator, [[GRID]], *inputs, **attributes)


def test_an_output_that_nobody_computes_is_named() -> None:
    with pytest.raises(WeightsError, match="MaxPool with the output 'places'"):
        computed("MaxPool", [[GRID]], outputs=("y", "places"), kernel_shape=[2, 2])


def test_dropout_that_is_trained_is_refused() -> None:
    assert computed("Dropout", [1.0], np.float32(0.5), np.bool_(False)).tolist() == [1]
    with pytest.raises(WeightsError, match="Dropout with training_mode"):
        computed("Dropout", [1.0], np.float32(0.5), np.bool_(True))


@pytest.mark.parametrize("opset", [8, 99])
def test_an_opset_that_nobody_has_tried_is_refused(opset: int) -> None:
    with pytest.raises(WeightsError, match=f"is of ONNX opset {opset}; 9 to 28 are read"):
        computed("Relu", [1.0], opset=opset)


def test_opset_10_takes_the_next_number_where_it_leaves_some_out() -> None:
    """As ONNX's own test of opset 10, resize_downsample_nearest."""
    values = [[[[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]]]]
    scales = np.array([1, 1, 0.6, 0.6], np.float32)
    assert computed("Resize", values, scales, opset=10, mode="nearest")[0, 0].tolist() == [[1, 3]]


@pytest.mark.parametrize(
    ("operator", "opset", "outputs", "attributes", "said"),
    [
        ("BatchNormalization", 13, ("y", "mean"), {}, "outputs of training"),
        ("Constant", 13, ("y",), {"sparse_value": np.zeros(1)}, "Constant with sparse_value"),
    ],
)
def test_training_and_sparse_constants_are_refused_by_name(
    operator: str, opset: int, outputs: tuple[str, ...], attributes: dict[str, Any], said: str
) -> None:
    with pytest.raises(WeightsError, match=said):
        computed(operator, [[1.0]], opset=opset, outputs=outputs, **attributes)
