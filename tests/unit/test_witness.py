"""What is read of a file is compared with another runtime: a misreading is refused by its operator's name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from models.contract.errors import WeightsError
from models.exports import image_trial, witness
from models.exports.child import _tried
from models.exports.exported import _Declared
from models.onnx.graph import load_onnx
from models.onnx.operators import OPERATORS, as_tensor

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

SIZE = 16


def constant(name: str, values: Any) -> Any:
    array = np.array(values)
    return onnx.numpy_helper.from_array(array.astype(np.int64 if array.dtype.kind == "i" else np.float32), name)


def saved(path: Path, nodes: Sequence[Any], constants: Sequence[Any], output: str = "y", opset: int = 18) -> Path:
    inputs = [onnx.helper.make_tensor_value_info("images", onnx.TensorProto.FLOAT, ["n", 3, SIZE, SIZE])]
    outputs = [onnx.helper.make_empty_tensor_value_info(output)]
    graph = onnx.helper.make_graph(nodes, "g", inputs, outputs, constants)
    imports = [onnx.helper.make_opsetid("", opset)]
    onnx.save(onnx.helper.make_model(graph, opset_imports=imports, ir_version=9), path)
    return path


def classifier(path: Path) -> Path:
    """Enlarges, convolves, normalises, and ends in five probabilities; a bias is computed of constants alone."""
    make, generator = onnx.helper.make_node, np.random.default_rng(0)
    nodes = [
        make("Resize", ["images", "", "twice"], ["large"], name="/enlarge", mode="linear"),
        make("Conv", ["large", "weight"], ["seen"], name="/first/conv", pads=[1] * 4, strides=[2, 2]),
        make("BatchNormalization", ["seen", "scale", "bias", "mean", "var"], ["normal"], name="/norm", epsilon=1e-3),
        make("Gelu", ["normal"], ["active"], name="/gelu"),
        make("GlobalAveragePool", ["active"], ["pooled"], name="/pool"),
        make("Sub", ["half", "half_more"], ["negative"], name="/negative"),
        make("Reshape", ["pooled", "shape"], ["flat"], name="/flat"),
        make("Gemm", ["flat", "head", "negative"], ["logits"], name="/head", alpha=0.5),
        make("Softmax", ["logits"], ["y"], name="/softmax"),
    ]
    constants = [
        constant("twice", [1.0, 1, 2, 2]),
        constant("weight", 0.2 * generator.normal(size=(8, 3, 3, 3))),
        *(constant(name, generator.uniform(0.5, 2, 8)) for name in ("scale", "bias", "mean", "var")),
        constant("half", [0.5] * 5),
        constant("half_more", [1.0, 1, 2, 1, 1]),
        constant("shape", [-1, 8]),
        constant("head", generator.normal(size=(8, 5))),
    ]
    return saved(path, nodes, constants, opset=20)


def asked(file: Path, **sidecar: Any) -> dict[str, Any]:
    images = {"sidecar": sidecar, "labels": None, "takes": "classes"}
    return {**_Declared().model_dump(), "images": images, "own": [str(file)]}


def changed(operator: str, how: Callable[[Any], Any] = lambda found: found, **attributes: Any) -> Any:
    """Make an operator that is read wrongly: with other attributes, or with another result."""
    right = OPERATORS[operator]
    return lambda inputs, given: how(right(inputs, {**given, **attributes}))


MISREADINGS: dict[str, tuple[str, Any]] = {
    "Resize '/enlarge'": ("Resize", {"coordinate_transformation_mode": "align_corners"}),
    "Conv '/first/conv'": ("Conv", lambda found: found.flip(1)),
    "BatchNormalization '/norm'": ("BatchNormalization", {"epsilon": 1e-1}),
    "Gelu '/gelu'": ("Gelu", {"approximate": "tanh"}),
    "GlobalAveragePool '/pool'": ("GlobalAveragePool", lambda found: found * 1.001),
    "Sub '/negative'": ("Sub", lambda found: -found),
    "Gemm '/head'": ("Gemm", {"alpha": 1.0}),
    "Softmax '/softmax'": ("Softmax", {"axis": 0}),
}


def test_a_file_that_is_read_rightly_says_with_what_it_was_compared(tmp_path: Path) -> None:
    file = classifier(tmp_path / "a.onnx")
    found = _tried(str(file), "onnx", asked(file, task="classify", size=[SIZE, SIZE]))
    assert found.images is not None
    assert "ONNX Runtime" in found.images.witness
    assert float(found.images.witness.rpartition("difference is ")[2].split()[0]) < 1e-5


@pytest.mark.parametrize("called", MISREADINGS)
def test_an_operator_that_is_misread_is_refused_by_its_name(
    called: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    operator, how = MISREADINGS[called]
    monkeypatch.setattr(witness, "_WHOLE", 1e-6)  # So that the least of these is looked at.
    wrong = changed(operator, **how) if isinstance(how, dict) else changed(operator, how)
    monkeypatch.setitem(OPERATORS, operator, wrong)
    file = classifier(tmp_path / "a.onnx")
    with pytest.raises(WeightsError, match=f"a.onnx is not read as ONNX Runtime .*: {called} "):
        _tried(str(file), "onnx", asked(file, task="classify", size=[SIZE, SIZE]))


def said_of(file: Path) -> str:
    """Return the witness's sentence on a file of one output, of any meaning."""
    graph, read = load_onnx(file)
    pictures = torch.rand((1, 3, SIZE, SIZE), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        ours = [as_tensor(each).float() for each in graph(pictures)]
    return witness.compared(file, "onnx", read, [pictures], [ours])


def test_a_network_that_enlarges_rounding_is_no_misreading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its outputs may be any; what each operator makes of the same numbers decides."""
    make = onnx.helper.make_node
    nodes = [make("ReduceMean", ["images", "all"], ["mean"]), make("Sub", ["images", "mean"], ["small"])]
    nodes += [make("Mul", ["small", "much"], ["large"]), make("Sin", ["large"], ["y"])]
    file = saved(tmp_path / "a.onnx", nodes, [constant("all", [1, 2, 3]), constant("much", 1e6)])
    right = OPERATORS["ReduceMean"]
    monkeypatch.setitem(OPERATORS, "ReduceMean", lambda inputs, given: right(inputs, given) * (1 + 2**-22))
    assert said_of(file).startswith("each operator computes what ONNX Runtime")
    nodes = [make("Add", ["images", "by"], ["low"]), make("Sigmoid", ["low"], ["y"])]  # Its errors are those of 0.5.
    assert said_of(saved(tmp_path / "b.onnx", nodes, [constant("by", -12.0)])).startswith("each operator computes")


def test_halves_that_only_some_runs_round_are_no_misreading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ONNX Runtime rounds a value to float16 where it is asked for it, and may compute on with what it was before."""
    make, count = onnx.helper.make_node, 61
    for name, value in (("_AT_ONCE", count), ("_WHOLE_IN_HALVES", 0.0), ("_ALONE_IN_HALVES", 1e-3)):
        monkeypatch.setattr(witness, name, value)
    nodes = [make("Cast", ["images"], ["0"], to=onnx.TensorProto.FLOAT16)]
    for n in range(1, count, 2):
        nodes += [make("Mul", [f"{n - 1}", "by"], [f"{n}"]), make("Concat", [f"{n}"], [f"{n + 1}"], axis=1)]
    nodes += [make("Exp", ["60"], ["end"]), make("Cast", ["end"], ["y"], to=onnx.TensorProto.FLOAT)]
    file = saved(tmp_path / "a.onnx", nodes, [onnx.numpy_helper.from_array(np.array([1.01], np.float16), "by")])
    assert said_of(file).startswith("each operator computes what ONNX Runtime")
    monkeypatch.setitem(OPERATORS, "Exp", changed("Exp", lambda found: found * 0.99))
    with pytest.raises(WeightsError, match="Exp 'end' differs by"):
        said_of(file)


def test_a_misreading_is_refused_though_operators_cannot_be_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = classifier(tmp_path / "a.onnx")
    monkeypatch.setitem(OPERATORS, "Conv", changed("Conv", lambda found: found.flip(1)))
    monkeypatch.setattr(witness, "_MOST_BYTES", 1)
    with pytest.raises(WeightsError, match=r"outputs differ by .*, whose operator is not known: the file is too large"):
        said_of(file)


def test_a_network_of_a_library_is_compared_as_a_whole(tmp_path: Path) -> None:
    layer = torch.nn.Conv2d(3, 4, 3)

    def one(given: Tensor) -> list[Tensor]:
        return [layer(given).detach()]

    def other(given: Tensor) -> list[Tensor]:
        return [layer(given.flip(1)).detach()]

    given = [torch.rand((1, 3, 8, 8))]
    ours = [one(given[0])]
    assert "difference is 0.0e+00" in witness.of_network("timm itself", one, given, ours, tmp_path / "a.pth")
    torch.save({"model": {"a.b": given[0]}, "ema": {"a.b": given[0]}}, tmp_path / "a.pth")
    with pytest.raises(WeightsError, match=r"a\.pth is not read as timm itself .* under ema, model: save one"):
        witness.of_network("timm itself", other, given, ours, tmp_path / "a.pth")


@pytest.mark.parametrize("inside", [False, True], ids=["input of that type", "input of float32"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_a_program_in_another_float_is_compared_with_itself(tmp_path: Path, dtype: torch.dtype, inside: bool) -> None:
    class Network(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.Flatten(), torch.nn.Linear(1568, 5))

        def forward(self, pixels: Tensor) -> Tensor:
            found: Tensor = self.body(pixels.to(dtype))
            return found

    given, file = torch.rand(1, 3, SIZE, SIZE), tmp_path / "mine.pt2"
    program = torch.export.export(Network().to(dtype), (given if inside else given.to(dtype),))
    torch.export.save(program, file)
    found = image_trial.tried(file, "program", {"task": "classify"}, list("abcde"), "classes")
    assert found is not None
    assert "compared with torch.export itself on 2 pictures" in found.witness


@pytest.mark.parametrize(
    ("ours", "wanted", "reason"),
    [
        (torch.ones(2, 3), np.ones((3, 2), np.float32), "has the shape [2, 3], and not [3, 2]"),
        (torch.tensor([1, 2]), np.array([1, 3]), "has 1 other numbers of 2"),
        (torch.tensor([1.0, float("nan")]), np.array([1.0, 2.0], np.float32), "is not finite in the same places"),
        (torch.tensor([1.0, float("inf")]), np.array([1.0, -np.inf], np.float32), "is not finite in the same places"),
        (torch.tensor([1.0, 100.0]), np.array([1.1, 100.0], np.float32), "differs by 0.1 in numbers of up to 100"),
        (torch.tensor([1.0, 100.0]), np.array([1.001, 100.0], np.float32), ""),
        ([1, 2], np.array([1, 2]), ""),
        (3, np.array([3]), ""),
        (torch.tensor([7e4]), np.array([np.inf], np.float16), ""),
    ],
)
def test_what_counts_as_the_same(ours: Any, wanted: Any, reason: str) -> None:
    assert witness.difference(ours, wanted, 2e-5) == reason
