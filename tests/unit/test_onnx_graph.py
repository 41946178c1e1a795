"""models.onnx.file, onnx_operators, onnx_layers and onnx_graph: ONNX files against ONNX Runtime, and broken ones."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from models.contract.errors import WeightsError
from models.onnx.file import Node, OnnxFile, Value, read_onnx
from models.onnx.graph import OnnxGraph, load_onnx

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")

F, I = onnx.TensorProto.FLOAT, onnx.TensorProto.INT64  # noqa: E741
IMAGE = (1, 4, 6, 8)
CASES: dict[str, tuple[str, dict[str, Any], list[Any]]] = {
    "conv": ("Conv", {"strides": [2, 1], "pads": [1, 0, 1, 0]}, [np.ones((5, 4, 3, 3)), np.arange(5.0)]),
    "conv with the same size": ("Conv", {"auto_pad": "SAME_UPPER", "strides": [2, 2]}, [np.ones((2, 4, 3, 3))]),
    "transposed conv": ("ConvTranspose", {"strides": [2, 2]}, [np.ones((4, 2, 2, 2))]),
    "max pool": ("MaxPool", {"kernel_shape": [5, 5], "pads": [2, 2, 2, 2]}, []),
    "max pool, uneven": ("MaxPool", {"kernel_shape": [3, 3], "pads": [0, 0, 1, 1], "strides": [2, 2]}, []),
    "max pool that rounds up, uneven": (
        "MaxPool",
        {"kernel_shape": [3, 3], "pads": [0, 0, 1, 1], "strides": [3, 4], "ceil_mode": 1},
        [],
    ),
    "average pool that rounds up, uneven": (
        "AveragePool",
        {"kernel_shape": [3, 3], "pads": [0, 0, 1, 1], "strides": [3, 4], "ceil_mode": 1, "count_include_pad": 1},
        [],
    ),
    "twice as large": (
        "Resize",
        {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"},
        [None, np.array([1, 1, 2, 2])],
    ),
    "halfway between two": ("Resize", {"nearest_mode": "round_prefer_floor"}, [None, np.array([1, 1, 0.55, 0.55])]),
    "linear": ("Resize", {"mode": "linear"}, [None, np.array([1, 1, 1.5, 2])]),
    "slice": ("Slice", {}, [np.array([1], np.int64), np.array([3], np.int64), np.array([2], np.int64)]),
    "slice backwards": ("Slice", {}, [np.array(each, np.int64) for each in ([-1], [-100], [3], [-2])]),
    "gather": ("Gather", {"axis": 1}, [np.array([[0, -1], [2, 1]], np.int64)]),
    "reshape": ("Reshape", {}, [np.array([0, -1, 4], np.int64)]),
    "softmax": ("Softmax", {"axis": 1}, []),
    "mean": ("ReduceMean", {"keepdims": 0}, [np.array([2, 3], np.int64)]),
    "place of the largest": ("ArgMax", {"axis": 1, "keepdims": 0}, []),
    "clip": ("Clip", {}, [np.array(-0.5), np.array(0.5)]),
    "pad": ("Pad", {}, [np.array([0, 0, 1, 2, 0, 0, 3, 0], np.int64), np.array(7.0)]),
    "reflecting pad": ("Pad", {"mode": "reflect"}, [np.array([0, 0, 1, 2, 0, 0, 3, 0], np.int64)]),
    "wrapping pad": ("Pad", {"mode": "wrap"}, [np.array([0, 0, 1, 2, 0, 0, 3, 0], np.int64)]),
    "layer norm": ("LayerNormalization", {"axis": -1}, [np.arange(8.0), np.ones(8)]),
    "layer norm by one number": ("LayerNormalization", {"axis": -2}, [np.array([3.0]), np.array([1.0])]),
    "batch norm": ("BatchNormalization", {}, [np.arange(4.0), np.ones(4), np.ones(4), np.full(4, 2.0)]),
    "instance norm": ("InstanceNormalization", {}, [np.arange(4.0), np.ones(4)]),
    "hard swish": ("HardSwish", {}, []),
    "space": ("DepthToSpace", {"blocksize": 2}, []),
}


def written(
    path: Path, nodes: list[Any], tensors: list[Any] | None = None, taken: tuple[int, ...] = (1,), kind: int = F
) -> Path:
    """Write a file that takes x and answers y."""
    values = [onnx.helper.make_tensor_value_info("x", F, taken), onnx.helper.make_tensor_value_info("y", kind, None)]
    graph = onnx.helper.make_graph(nodes, "g", values[:1], values[1:], tensors)
    made = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=9)
    path.write_bytes(made.SerializeToString())
    return path


def saved(path: Path, operator: str, attributes: dict[str, Any], constants: list[Any]) -> Path:
    names, tensors = ["x"], []
    for number, value in enumerate(constants):
        names.append("" if value is None else f"c{number}")
        if value is not None:
            whole = np.asarray(value).dtype == np.int64 and operator != "Resize"
            array = np.asarray(value, np.int64 if whole else np.float32)
            tensors.append(onnx.numpy_helper.from_array(array, f"c{number}"))
    node = onnx.helper.make_node(operator, names, ["y"], **attributes)
    return written(path, [node], tensors, IMAGE, I if operator == "ArgMax" else F)


@pytest.mark.parametrize("name", CASES)
def test_an_operator_computes_what_onnx_runtime_computes(tmp_path: Path, name: str) -> None:
    path = saved(tmp_path / "one.onnx", *CASES[name])
    x = np.random.default_rng(0).standard_normal(IMAGE).astype(np.float32)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    [expected] = session.run(None, {"x": x})
    graph, _ = load_onnx(path)
    [found] = graph(torch.from_numpy(x))
    assert tuple(found.shape) == expected.shape
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-4, atol=1e-5)


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.SiLU(), nn.Conv2d(8, 8, 3, 2, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.body(x)
        batch, channels, height, width = y.shape
        y = y.reshape(batch, 2, channels // 2, height * width).softmax(1).flatten(1, 2)
        return torch.cat((y * 8, y.sigmoid()), 1)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("small") / "small.onnx"
    network = Small().eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(network, (torch.rand(1, 3, 32, 32),), str(path), dynamo=False, opset_version=17)
    return path


def test_a_file_of_batch_one_takes_batches_when_its_shapes_are_freed(small: Path) -> None:
    """In float64: other kernels compute a batch than one, and round otherwise."""
    graph, _ = load_onnx(small)
    x = torch.rand(3, 3, 32, 32, dtype=torch.float64)
    graph.core.free_batch = graph.tail.free_batch = True
    graph.double()
    [together] = graph(x)
    for row in range(3):
        [alone] = graph(x[row : row + 1])
        torch.testing.assert_close(together[row : row + 1], alone)


def test_the_tail_stays_float32(small: Path) -> None:
    graph, _ = load_onnx(small)
    assert {call.operator for call in graph.core._calls} >= {"Conv"}
    assert "Conv" not in {call.operator for call in graph.tail._calls}
    graph.core.to(torch.bfloat16)
    [found] = graph(torch.rand(1, 3, 32, 32).bfloat16())
    assert found.dtype == torch.float32


def test_operators_that_are_not_known_are_all_named_in_one_line(tmp_path: Path) -> None:
    nodes = [onnx.helper.make_node("Lo\n\x1b[2Jop", ["x"], ["z"]), onnx.helper.make_node("Det", ["z"], ["y"])]
    path = written(tmp_path / "strange.onnx", nodes)
    with pytest.raises(WeightsError, match=r"strange\.onnx uses operators that are not known here: Det, ") as raised:
        load_onnx(path)
    assert str(raised.value).isprintable()


def test_weights_whose_file_is_cut_short_are_said_to_be(tmp_path: Path) -> None:
    tensor = onnx.TensorProto(name="w", dims=[4], data_type=F, data_location=onnx.TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value="w.bin")
    tensor.external_data.add(key="length", value="16")
    path = written(tmp_path / "m.onnx", [onnx.helper.make_node("Add", ["x", "w"], ["y"])], [tensor], (4,))
    (tmp_path / "w.bin").write_bytes(bytes(7))
    with pytest.raises(WeightsError, match=r"keeps weights in w\.bin, which is cut short at 7 bytes"):
        read_onnx(path)


def test_a_constant_that_asks_for_all_memory_is_refused(tmp_path: Path) -> None:
    shape = onnx.numpy_helper.from_array(np.array([1 << 20, 1 << 20], np.int64), "s")
    nodes = [onnx.helper.make_node("ConstantOfShape", ["s"], ["c"]), onnx.helper.make_node("Add", ["x", "c"], ["y"])]
    with pytest.raises(WeightsError, match="too much memory"):
        load_onnx(written(tmp_path / "bomb.onnx", nodes, [shape]))


@settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(edits=st.lists(st.tuples(st.integers(0, 2**31), st.integers(0, 255)), min_size=1, max_size=6), cut=st.booleans())
def test_a_changed_file_is_read_or_refused(
    small: Path, tmp_path: Path, edits: list[tuple[int, int]], cut: bool
) -> None:
    content = bytearray(small.read_bytes())
    for place, value in edits:
        content[place % len(content)] = value
    path = tmp_path / "changed.onnx"
    path.write_bytes(content[: edits[0][0] % len(content)] if cut else content)
    try:
        graph, _ = load_onnx(path)
    except WeightsError as error:
        sentence = str(error)
    else:
        assert graph.core.input_names
        return
    assert sentence.startswith("changed.onnx")
    assert "\n" not in sentence


def test_a_constant_that_is_used_before_and_after_layers_can_be_traced() -> None:
    """OpenVINO's engine traces, and tracing refuses a tensor that two parts, or two names, have in common."""
    nodes = [
        Node("Identity", ("c",), ("d",), {}),
        Node("Mul", ("x", "c"), ("a",), {}),
        Node("Add", ("a", "d"), ("b",), {}),
        Node("Conv", ("b", "w"), ("e",), {}),
        Node("Mul", ("e", "c"), ("y",), {}),
    ]
    constants = {"c": np.full((1, 3, 1, 1), 2, np.float32), "w": np.ones((3, 3, 1, 1), np.float32)}
    values = Value("x", np.dtype("<f4"), (1, 3, 4, 4)), Value("y", None, None)
    graph = OnnxGraph(OnnxFile(17, {}, nodes, constants, values[:1], values[1:]), "shared.onnx").eval()
    x = torch.randn(1, 3, 4, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # That tracing is deprecated.
        trace: Any = torch.jit.trace
        traced = trace(graph, x)
    torch.testing.assert_close(traced(x)[0], 2 * (2 * x + 2).sum(1, keepdim=True).expand(1, 3, 4, 4))
