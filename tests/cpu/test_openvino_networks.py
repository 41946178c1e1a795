"""Networks of OpenVINO in PyTorch: the same numbers as OpenVINO's own, layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from models.contract.errors import WeightsError
from models.exports import witness
from models.onnx.graph import load_onnx
from models.onnx.operators import OPERATORS

openvino = pytest.importorskip("openvino")
ops = pytest.importorskip("openvino.opset14")

Nodes = Callable[[Any], Any]


def numbers(*shape: int, seed: int = 3) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def constant(value: Any, dtype: Any = np.int64) -> Any:
    return ops.constant(np.array(value, dtype))


def quantised(x: Any) -> Any:
    limits = [constant(value, np.float32) for value in (-1.0, 1.5, -2.0, 3.0)]
    return ops.fake_quantize(x, *limits, 16)


def interpolated(x: Any, mode: str, how: str, rounding: str = "floor", cube: float = -0.75, scale: float = 2) -> Any:
    attributes = {"mode": mode, "shape_calculation_mode": "scales", "coordinate_transformation_mode": how}
    factors, axes = constant([scale, scale], np.float32), constant([2, 3])
    return ops.interpolate(x, factors, axes=axes, nearest_mode=rounding, cube_coeff=cube, **attributes)


def either(x: Any) -> Any:
    return ops.logical_xor(*(ops.greater(x, constant(limit, np.float32)) for limit in (0, 0.5)))


def cut(x: Any) -> Any:
    masks = {"begin_mask": [1, 0, 1, 0], "end_mask": [1, 0, 1, 0]}
    return ops.strided_slice(x, constant([0, 1, 0, 2]), constant([0, 3, 0, 7]), constant([1, 1, 2, 2]), **masks)


LAYERS: dict[str, Nodes] = {
    "convolution": lambda x: ops.convolution(x, ops.constant(numbers(6, 4, 3, 3)), [2, 1], [1, 0], [1, 0], [1, 2]),
    "same padding": lambda x: ops.convolution(
        x, ops.constant(numbers(6, 4, 3, 3)), [2, 2], [0, 0], [0, 0], [1, 1], "same_upper"
    ),
    "groups": lambda x: ops.group_convolution(x, ops.constant(numbers(2, 3, 2, 3, 3)), [1, 1], [1, 1], [1, 1], [1, 1]),
    "transposed": lambda x: ops.convolution_backprop_data(x, ops.constant(numbers(4, 5, 2, 2)), strides=[2, 2]),
    "product": lambda x: ops.matmul(x, ops.constant(numbers(4, 9, 5)), True, False),
    "swish": ops.swish,
    "gelu": lambda x: ops.gelu(x, "tanh"),
    "clamp": lambda x: ops.clamp(x, -0.5, 0.6),
    "remainders": lambda x: ops.add(ops.mod(x, constant(0.7, np.float32)), ops.floor_mod(x, constant(0.4, np.float32))),
    "quantised": quantised,
    "halves": lambda x: ops.multiply(x, ops.convert(ops.constant(numbers(4, 1, 1).astype(np.float16)), "f32")),
    "largest": lambda x: ops.max_pool(x, [2, 2], [1, 1], [1, 1], [0, 0], [3, 3], "ceil").output(0),
    "average": lambda x: ops.avg_pool(x, [2, 2], [1, 1], [1, 1], [3, 3], False),
    "nearest": lambda x: interpolated(x, "nearest", "asymmetric"),
    "bilinear": lambda x: interpolated(x, "linear_onnx", "half_pixel"),
    "nearest by floor": lambda x: interpolated(x, "nearest", "half_pixel", "floor", scale=1.7),
    "nearest by ceil": lambda x: interpolated(x, "nearest", "half_pixel", "ceil", scale=1.7),
    "nearest by rounding up": lambda x: interpolated(x, "nearest", "asymmetric", "round_prefer_ceil"),
    "cubic": lambda x: interpolated(x, "cubic", "asymmetric", cube=-0.5),
    "smaller": lambda x: interpolated(x, "linear_onnx", "asymmetric", scale=0.6),
    "transposed axes": lambda x: ops.transpose(x, constant([0, 2, 3, 1])),
    "reshaped": lambda x: ops.reshape(x, constant([0, 2, -1]), True),
    "split": lambda x: ops.variadic_split(x, constant(1), constant([1, -1])).output(1),
    "halved": lambda x: ops.split(x, constant(1), 2).output(1),
    "gathered": lambda x: ops.gather(x, constant([2, 0]), constant(1)),
    "means": lambda x: ops.reduce_mean(x, constant([2, 3]), True),
    "best": lambda x: ops.topk(x, constant(3), 3, "max", "value").output(0),
    "places": lambda x: ops.convert(ops.topk(x, constant(3), 3, "min", "value").output(1), "f32"),
    "sliced": lambda x: ops.slice(x, constant([1, 0]), constant([3, 99]), constant([1, 2]), constant([1, 3])),
    "cut": cut,
    "padded": lambda x: ops.pad(x, constant([0, 0, 1, 2]), constant([0, 0, 0, 1]), "constant", constant(7, np.float32)),
    "broadcast": lambda x: ops.add(x, ops.broadcast(constant(0.5, np.float32), ops.shape_of(x))),
    "chosen": lambda x: ops.select(ops.greater(x, constant(0, np.float32)), x, ops.negative(x)),
    "shares": lambda x: ops.softmax(x, 1),
    "either": lambda x: ops.select(either(x), x, ops.negative(x)),
}


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, Any]]:
    """OpenVINO's output and ours, by the name of the layer: of one network with all of them."""
    folder = tmp_path_factory.mktemp("networks")
    x = ops.parameter([1, 4, 9, 9], np.float32, "x")
    network = openvino.Model([ops.result(layer(x)) for layer in LAYERS.values()], [x], "all")
    openvino.save_model(network, folder / "all.xml", compress_to_fp16=False)
    given = numbers(1, 4, 9, 9, seed=5)
    theirs = openvino.Core().compile_model(folder / "all.xml", "CPU", {"INFERENCE_PRECISION_HINT": "f32"})([given])
    graph, file = load_onnx(Path(folder / "all.xml"))
    assert file.inputs[0].shape == (1, 4, 9, 9)
    with torch.inference_mode():
        ours = graph(torch.from_numpy(given))
    return {name: (theirs[place], each) for place, (name, each) in enumerate(zip(LAYERS, ours, strict=True))}


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_computes_what_openvino_computes(answers: dict[str, tuple[Any, Any]], name: str) -> None:
    theirs, ours = answers[name]
    assert theirs.shape == tuple(ours.shape)
    np.testing.assert_allclose(ours.numpy(), theirs, rtol=1e-4, atol=2e-5)


def test_a_layer_of_openvinos_that_is_misread_is_refused_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = ops.parameter([1, 3, 16, 16], np.float32, name="images")
    seen = ops.convolution(images, ops.constant(numbers(4, 3, 3, 3)), [1, 1], [1, 1], [1, 1], [1, 1], name="first")
    file = tmp_path / "best.xml"
    openvino.save_model(openvino.Model([ops.softmax(ops.relu(seen, name="active"), 1, name="shares")], [images]), file)
    _, read = load_onnx(file)
    pictures = torch.rand((1, 3, 16, 16), generator=torch.Generator().manual_seed(0))

    def ours(given: Tensor) -> Sequence[Tensor]:
        graph, _ = load_onnx(file)
        return list(graph(given))

    assert witness.compared(file, "xml", read, [pictures], ours).startswith("compared with OpenVINO")
    right = OPERATORS["Relu"]
    monkeypatch.setitem(OPERATORS, "Relu", lambda inputs, given: right(inputs, given) * 1.01)
    with pytest.raises(WeightsError, match=r"best\.xml is not read as OpenVINO .*: of the same inputs Relu 'active' "):
        witness.compared(file, "xml", read, [pictures], ours)
