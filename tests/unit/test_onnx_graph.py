"""ONNX files against ONNX Runtime, operators from opset to opset, torchvision's detectors, and broken files."""

from __future__ import annotations

import re
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
from models.onnx.forms import as_detector
from models.onnx.graph import OnnxGraph, load_onnx
from models.onnx.operators import OPERATORS
from tests.support import exports_of_networks

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")

F = onnx.TensorProto.FLOAT
IMAGE = (1, 4, 6, 8)
CASES: dict[str, tuple[str, dict[str, Any], list[Any]]] = {
    "conv": ("Conv", {"strides": [2, 1], "pads": [1, 0, 1, 0]}, [np.ones((5, 4, 3, 3)), np.arange(5.0)]),
    "conv with the same size": ("Conv", {"auto_pad": "SAME_UPPER", "strides": [2, 2]}, [np.ones((2, 4, 3, 3))]),
    "max pool, uneven": ("MaxPool", {"kernel_shape": [3, 3], "pads": [0, 0, 1, 1], "strides": [2, 2]}, []),
    "twice as large": (
        "Resize",
        {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"},
        [None, np.array([1, 1, 2, 2])],
    ),
    "halfway between two": ("Resize", {"nearest_mode": "round_prefer_floor"}, [None, np.array([1, 1, 0.55, 0.55])]),
    "slice backwards": ("Slice", {}, [np.array(each, np.int64) for each in ([-1], [-100], [3], [-2])]),
    "gather": ("Gather", {"axis": 1}, [np.array([[0, -1], [2, 1]], np.int64)]),
    "reshape": ("Reshape", {}, [np.array([0, -1, 4], np.int64)]),
    "reflecting pad": ("Pad", {"mode": "reflect"}, [np.array([0, 0, 1, 2, 0, 0, 3, 0], np.int64)]),
    "wrapping pad": ("Pad", {"mode": "wrap"}, [np.array([0, 0, 1, 2, 0, 0, 3, 0], np.int64)]),
    "layer norm by one number": ("LayerNormalization", {"axis": -2}, [np.array([3.0]), np.array([1.0])]),
    "space": ("DepthToSpace", {"blocksize": 2}, []),
}
if onnxruntime.__version__ < "1.24":  # The last for Python 3.10 does not broadcast a scale.
    del CASES["layer norm by one number"]


def written(path: Path, nodes: list[Any], tensors: list[Any] | None = None, taken: tuple[int, ...] = (1,)) -> Path:
    values = [onnx.helper.make_tensor_value_info("x", F, taken), onnx.helper.make_tensor_value_info("y", F, None)]
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
    return written(path, [node], tensors, IMAGE)


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
        y = nn.functional.interpolate(self.body(x), scale_factor=2).clamp(-2, 6)  # Resize, Clip.
        y = torch.cat(nn.functional.pad(y, (0, 1, y.shape[3] % 3, 4)).chunk(2, 1), 1)  # Pad; Shape, Div and Slice.
        batch, channels, height, width = y.shape
        y = y.reshape(batch, 2, channels // 2, height * width).softmax(1).flatten(1, 2)
        return torch.cat((y * 8, y.sigmoid()), 1)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    file, sizes = tmp_path_factory.mktemp("one") / "small.onnx", {"x": {2: "height", 3: "width"}}
    given = torch.rand(1, 3, 32, 32)
    return exports_of_networks.written(file, Small(), given, input_names=["x"], dynamic_axes=sizes)


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


@pytest.mark.filterwarnings("ignore")  # torch.jit.trace, by which OpenVINO reads networks, is deprecated.
def test_every_tracer_follows_the_whole_graph(small: Path) -> None:
    """Else TensorRT and OpenVINO refuse it, and TorchDynamo computes its parts one by one."""
    graph, _ = load_onnx(small)
    example = torch.rand(1, 3, 32, 32)
    [expected] = onnxruntime.InferenceSession(small).run(None, {"x": example.numpy()})
    np.testing.assert_allclose(graph(example)[0].numpy(), expected, rtol=1e-4, atol=1e-5)
    exported = torch.export.export(graph, (example,)).module()
    for traced in (torch.compile(graph, backend="eager", fullgraph=True), exported, torch.jit.trace(graph, example)):
        torch.testing.assert_close(traced(example), graph(example))


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


@settings(max_examples=200, deadline=None, suppress_health_check=[*HealthCheck])
@given(edits=st.lists(st.tuples(st.integers(0, 2**31), st.integers(0, 255)), min_size=1, max_size=6), cut=st.booleans())
def test_a_changed_file_is_read_or_refused(
    small: Path, tmp_path: Path, edits: list[tuple[int, int]], cut: bool
) -> None:
    content = bytearray(small.read_bytes())
    for place, value in edits:
        content[place % len(content)] = value
    path = tmp_path / "changed.onnx"
    path.write_bytes(content[: edits[0][0] % len(content)] if cut else content)
    sentence = "changed.onnx is read"
    try:
        assert load_onnx(path)[0].core.input_names
    except WeightsError as error:
        sentence = str(error)
    assert re.fullmatch("changed.onnx.*", sentence)


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
    torch.testing.assert_close(computed(operator, logits.tolist(), opset=opset), right[:, :, None, None])
    torch.testing.assert_close(computed(operator, logits.tolist(), opset=13, axis=1).flatten(1), right)


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
        ("Resize", (None, None, [1, 1, 4, 4]), {"coordinate_transformation_mode": "tf_crop_and_resize"}, "tf_crop"),
        ("Relu", (), {"threshold": 0.5}, "Relu with threshold 0.5"),
        ("DequantizeLinear", (np.float32(1),), {"block_size": 2}, "DequantizeLinear with block_size 2"),
        ("GroupNormalization", (np.ones(1), np.ones(1)), {"num_groups": 1}, "a scale for each group"),
        ("ArgMax", (), {"select_last_index": 1}, "ArgMax with select_last_index"),
        ("Resize", (None, None, [1, 1, 4, 4]), {"mode": "cubic", "exclude_outside": 1}, "exclude_outside"),
        ("Resize", (None, None, [1, 1, 4, 4]), {"mode": "cubic", "cubic_coeff_a": -0.5}, "cubic_coeff_a"),
        ("MaxPool", (), {"kernel_shape": [3, 3], "pads": [0, 0, 1, 1], "ceil_mode": 1}, "uneven padding"),
    ],
)
def test_what_is_not_computed_is_named(operator: str, inputs: Any, attributes: dict[str, Any], said: str) -> None:
    with pytest.raises(WeightsError, match=rf"^a\.onnx uses .*{said}.*, which is not computed here: .*convert_model\("):
        computed(operator, [[GRID]], *inputs, **attributes)


def value(name: str, shape: tuple[Any, ...], kind: str = "<f4") -> Value:
    return Value(name, np.dtype(kind), shape)


OF_DETECTORS = (value("image", (3, 240, 320)),)
OUTPUTS = (value("b", ("k", 4)), value("l", ("k",), "<i8"), value("s", ("k",)))


@pytest.mark.parametrize(
    ("inputs", "outputs", "told"),
    [
        (OF_DETECTORS, OUTPUTS, True),
        (OF_DETECTORS, (*OUTPUTS, value("masks", ("k", 1, 240, 320))), True),
        (OF_DETECTORS, (*OUTPUTS, value("points", ("k", 17, 3)), value("point scores", ("k", 17))), True),
        ((value("image", (1, 3, 240, 320)),), OUTPUTS, False),
        ((*OF_DETECTORS, value("more", (1,))), OUTPUTS, False),
        (OF_DETECTORS, OUTPUTS[:2], False),
        (OF_DETECTORS, (value("b", (5, 4)), value("l", (5,), "<i8"), value("s", (5,))), False),
        (OF_DETECTORS, (value("b", ("k", 4)), value("l", ("k",)), value("s", ("k",))), False),
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
    return OnnxFile(opset=17, nodes=nodes, inputs=OF_DETECTORS, outputs=(*OUTPUTS, value("masks", ("k", 1, 9, 9))))


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


def test_whole_numbers_of_shapes_are_divided_towards_zero() -> None:
    assert OPERATORS["Div"]([[7, -7, 7, -7, -12], [2, 2, -2, -2, 2]], {}) == [3, -3, -3, 3, -6]
