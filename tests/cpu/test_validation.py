"""`anychip validate`: planted faults are named by their layer, in networks and engines, also of ONNX files."""

from __future__ import annotations

import copy
import json
import shutil
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from anychip_tools.validation import whole
from anychip_tools.validation.whole import Validation
from app.cli import main
from backends import CompileOptions, Executable, LoadedNetwork
from backends.engines import EagerEngine, Engine, compile_first
from backends.engines.onnxruntime import OnnxRuntimeEngine
from backends.vendors.cpu import CpuBackend
from backends.vendors.table import CPU
from models import Model, open_model, parse_spec
from models.contract.measures import TENSOR_LIMITS, of_tensors
from models.sample import IMAGES
from models.sample.generator import KINDS
from tests.support.rows import row

WRONG = 1.5


class Layered(nn.Module):
    """Five convolutions of unlike names; `wrong_in`: a type in which the third computes something else."""

    input_shape = (16, 16, 3)

    def __init__(self, wrong_in: torch.dtype | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Conv2d(3, 8, 3)
        self.body = nn.Sequential(nn.Conv2d(8, 8, 3), Doubtful(wrong_in), nn.Conv2d(8, 8, 3))
        self.head = nn.Linear(8, 5)
        self.dtype = torch.float32

    def cast(self, dtype: torch.dtype) -> Layered:
        self.to(dtype)
        self.dtype = dtype
        return self

    def forward(self, pixels: Tensor) -> tuple[Tensor, ...]:
        x = (pixels.permute(0, 3, 1, 2).to(self.dtype) / 255) - 0.5
        x = self.body(torch.relu(self.stem(x))).mean((2, 3))
        return (self.head(x).float(),)


class Doubtful(nn.Module):
    def __init__(self, wrong_in: torch.dtype | None) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(8, 8, 3)
        self.wrong_in = wrong_in

    def forward(self, x: Tensor) -> Tensor:
        weight = self.convolution.weight
        # The same operators in every type, as of a kernel that is wrong for one of them.
        return nn.functional.conv2d(x, weight * (WRONG if x.dtype is self.wrong_in else 1.0), self.convolution.bias)


class Wrong(Engine):
    """An engine that computes one operator too large: of a graph, each that follows the marked layer."""

    name = "wrong"
    precisions = ("fp32",)

    def __init__(self, path: str) -> None:
        self._path = path

    def compile(
        self, network: Any, device: str, precision: str, batch_sizes: tuple[int, ...], options: CompileOptions
    ) -> Executable:
        network = copy.deepcopy(network)
        if isinstance(network, Layered):
            dict(network.named_modules())[self._path].register_forward_hook(lambda _, __, output: output * WRONG)
        else:
            for node in list(network.core.graph.nodes):
                stack = node.meta.get("nn_module_stack") or {}
                if node.op == "call_function" and [e[0] for e in stack.values()][-1:] == [self._path]:
                    with network.core.graph.inserting_after(node):
                        larger = network.core.graph.call_function(torch.ops.aten.mul.Tensor, (node, WRONG))
                    node.replace_all_uses_with(larger)
                    larger.args = (node, WRONG)
            network.core.recompile()
        return EagerEngine(row("fp32")).compile(network, device, precision, batch_sizes, options)


class WrongOnFiles(Engine):
    """An engine for ONNX files that has a node's result too large, wherever the file has that node."""

    name = "wrong"
    precisions = ("fp32",)
    forms = ("onnx",)

    def __init__(self, output: str, folder: Path) -> None:
        self._output, self._folder = output, folder

    def compile(
        self, network: Any, device: str, precision: str, batch_sizes: tuple[int, ...], options: CompileOptions
    ) -> Executable:
        file = scaled(Path(network.file), self._output, self._folder / f"wrong-{Path(network.file).name}")
        network.file = str(file)
        return OnnxRuntimeEngine(CPU).compile(network, device, precision, batch_sizes, options)


class OneEngine(CpuBackend):
    """The CPU with one engine of the test's own."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(1)
        self.engine = engine

    def load(
        self, network: Any, device: str, engine: str, precision: str, batch_sizes: Sequence[int], **options: Any
    ) -> LoadedNetwork:
        return compile_first([self.engine], network, "cpu:0", (precision,), batch_sizes, **options)


def scaled(source: Path, output: str, target: Path) -> Path:
    """Copy an ONNX file; multiply one node's result by WRONG."""
    import onnx

    proto = onnx.load(source)
    for place, node in enumerate(proto.graph.node):
        if output in node.output:
            node.output[list(node.output).index(output)] = "right"
            proto.graph.initializer.append(onnx.numpy_helper.from_array(np.float32(WRONG), "factor"))
            proto.graph.node.insert(place + 1, onnx.helper.make_node("Mul", ["right", "factor"], [output]))
            break
    onnx.save(proto, target)
    return target


class Stub:
    """As much of a model as a validation asks for."""

    task = "infer"
    name = "layered"
    may_be_infinite = False
    input_shape = Layered.input_shape
    results: tuple[Any, ...] = ()
    limits = TENSOR_LIMITS

    def errors(self, expected: Sequence[Any], outputs: Sequence[Any]) -> dict[str, float]:
        return of_tensors(expected, outputs)

    def __init__(self, wrong_in: torch.dtype | None = None) -> None:
        self.wrong_in = wrong_in

    def network(self) -> Layered:
        return Layered(self.wrong_in).eval().requires_grad_(False)


@pytest.fixture(scope="module")
def items() -> Any:
    return np.random.default_rng(0).integers(0, 256, (4, *Layered.input_shape), dtype=np.uint8)


@pytest.fixture(scope="module")
def onnx_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("onnxruntime")
    file = tmp_path_factory.mktemp("onnx") / "net.onnx"

    class Core(Layered):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            return self.head(self.body(torch.relu(self.stem(x))).mean((2, 3)))  # type: ignore[no-any-return]

    options: dict[str, Any] = {"dynamic_axes": {"x": {0: "n"}, "y": {0: "n"}}, "dynamo": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Of the older exporter.
        torch.onnx.export(
            Core().eval(), (torch.zeros(2, 3, 16, 16),), file, input_names=["x"], output_names=["y"], **options
        )
    return file


def validation(model: Any, engine: Engine, items: Any, folder: Path, reference: Any = None) -> Validation:
    return Validation(model, OneEngine(engine), "cpu:0", items, folder=folder, reference=reference)


def node_named(file: Path, part: str) -> str:
    import onnx

    return next(str(node.output[0]) for node in onnx.load(file).graph.node if part in node.output[0])


def test_a_right_engine_agrees_and_every_layer_is_right(items: Any, tmp_path: Path) -> None:
    tried = validation(Stub(), EagerEngine(row("fp32")), items, tmp_path)
    found = tried.compared("auto", "fp32")
    assert (found.verdict, found.culprit) == ("agrees", None)
    assert found.whole is not None
    assert found.whole.cosine == pytest.approx(1)
    depth = tried.depth("fp32")
    assert depth.first is None
    assert len(depth.layers) >= 5
    assert all(each.alone.relative < 1e-6 for each in depth.layers)


def test_a_layer_that_is_wrong_in_one_precision_is_named(items: Any, tmp_path: Path) -> None:
    tried = validation(Stub(torch.bfloat16), EagerEngine(row("bf16")), items, tmp_path)
    depth = tried.depth("bf16")
    assert depth.first is not None
    assert depth.first.layer.path == "body.1"


@pytest.mark.parametrize("path", ["stem", "body.1", "body.2", "head"])
def test_an_engine_that_is_wrong_from_a_layer_on_is_found_by_halves(path: str, items: Any, tmp_path: Path) -> None:
    found = validation(Stub(), Wrong(path), items, tmp_path).compared("auto", "fp32")
    assert found.verdict == "differs"
    assert found.culprit is not None
    assert found.culprit.path == path


def test_an_engine_that_is_wrong_from_a_node_of_an_onnx_file_on(onnx_file: Path, tmp_path: Path) -> None:
    model = open_model(parse_spec(str(onnx_file)), tmp_path)
    node = node_named(onnx_file, "body/body.2")
    tried = validation(model, WrongOnFiles(node, tmp_path), model.probes(), tmp_path)  # type: ignore[attr-defined]
    found = tried.compared("auto", "fp32")
    assert found.verdict == "differs"
    assert found.culprit is not None
    assert found.culprit.name == node


def test_the_command_names_the_wrong_node_of_an_onnx_file(
    onnx_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    node = node_named(onnx_file, "body/body.1")
    wrong = scaled(onnx_file, node, tmp_path / "wrong.onnx")
    plot, text = tmp_path / "error.svg", tmp_path / "report.md"
    arguments = ["validate", str(wrong), "--reference", str(onnx_file), "--device", "cpu", "--precisions", "fp32"]
    more = ["--engines", "onnxruntime", "--json", "--plot", str(plot), "--markdown", str(text)]
    assert main([*arguments, *more]) == 1
    found = json.loads(capsys.readouterr().out)
    [layers] = found["layers"]
    assert found["first_read"] == "ONNX Runtime itself computes it, so that nothing was compared"
    assert found["first_read"] in text.read_text()
    assert node in layers["first_divergent"]
    assert [each["verdict"] for each in found["comparisons"]] == ["differs"]
    assert node in plot.read_text()
    assert node in text.read_text()


def test_agreement_counts_classes_and_boxes() -> None:
    model: Model = open_model(parse_spec("resnet50:random"), Path())
    logits = np.zeros((2, 1000), dtype=np.float32)
    logits[:, :5] = np.arange(5, 0, -1)
    other = logits.copy()
    other[1, 7] = 9
    found = whole.agreement_of(model, [logits], [other])
    assert found == {"top1": 0.5, "top5": pytest.approx(0.9)}


def labelled_command(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, dict[str, float]]:
    """Return the accuracy that `anychip validate` reports, by precision."""
    options = ["--weights", "sample", "--device", "cpu", "--engines", "eager", "--no-layers", "--limit", "2", "--json"]
    assert main(["validate", *arguments, *options]) == 0
    return {each["precision"]: each["accuracy"] for each in json.loads(capsys.readouterr().out)["comparisons"]}


def test_the_command_measures_top1_on_a_folder_for_each_class(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for file in IMAGES.glob("classify_*.jpg"):
        folder = tmp_path / file.stem.removeprefix("classify_")
        folder.mkdir()
        shutil.copy(file, folder)
    shutil.copy(IMAGES / "classify_star.jpg", tmp_path / "heart")
    labels = ("--labels", str(tmp_path), "--images", str(tmp_path))
    found = labelled_command(capsys, "resnet50", *labels, "--precisions", "fp32,bf16")
    assert set(found) == {"fp32", "bf16"}
    assert all(each == {"top1": 0.75, "images": 4.0} for each in found.values())


def test_the_command_measures_map_on_labels_of_coco(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = json.loads((IMAGES / "expected.json").read_text())
    document: dict[str, list[Any]] = {"images": [], "annotations": [], "categories": []}
    document["categories"] = [{"id": number + 1, "name": kind} for number, kind in enumerate(KINDS)]
    for number in (1, 2, 3):
        document["images"].append({"id": number, "file_name": f"detect_{number}.jpg"})
        for thing in expected[f"detect_{number}.jpg"]["objects"]:
            x1, y1, x2, y2 = (thing["box"][side] for side in ("x1", "y1", "x2", "y2"))
            category = KINDS.index(thing["label"]) + 1
            box = [x1, y1, x2 - x1, y2 - y1]
            document["annotations"].append({"image_id": number, "category_id": category, "bbox": box})
    (tmp_path / "coco.json").write_text(json.dumps(document))
    labels = ("--coco", str(tmp_path / "coco.json"), "--images", str(IMAGES))
    found = labelled_command(capsys, "yolov8n", *labels, "--precisions", "fp32")["fp32"]
    assert found["images"] == 3
    assert found["map50"] == pytest.approx(1, abs=0.02)
    assert 0.7 < found["map50_95"] < found["map50"]
    assert main(["validate", "yolov8n", "--coco", str(tmp_path / "coco.json")]) == 1
    assert "--coco needs --images" in capsys.readouterr().err
