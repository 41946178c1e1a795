"""`anychip validate`: an engine that differs is told, and a planted fault is named by its layer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from anychip_tools.validation.whole import Validation
from app.cli import main
from backends import Executable, LoadedNetwork
from backends.engines import EagerEngine, Engine, compile_first
from backends.vendors.cpu import CpuBackend
from models.contract.measures import TENSOR_LIMITS, of_tensors
from tests.support.exports_of_networks import written
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


class Wrong(EagerEngine):
    """An engine that has the head's result too large."""

    def compile(self, network: Any, *how: Any) -> Executable:
        network.head.register_forward_hook(lambda _, __, output: output * WRONG)
        return super().compile(network, *how)


class OneEngine(CpuBackend):
    """The CPU with one engine of the test's own."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(1)
        self.engine = engine

    def load(
        self, network: Any, device: str, engine: str, precision: str, batch_sizes: Sequence[int], **options: Any
    ) -> LoadedNetwork:
        return compile_first([self.engine], network, "cpu:0", (precision,), batch_sizes, **options)


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

    axes = {"dynamic_axes": {"x": {0: "n"}, "y": {0: "n"}}}
    return written(file, Core(), torch.zeros(2, 3, 16, 16), input_names=["x"], output_names=["y"], **axes)


def validation(model: Any, engine: Engine, items: Any) -> Validation:
    return Validation(model, OneEngine(engine), "cpu:0", items)


def test_a_right_engine_agrees_and_every_layer_is_right(items: Any) -> None:
    tried = validation(Stub(), EagerEngine(row("fp32")), items)
    found = tried.compared("auto", "fp32")
    assert found.verdict == "agrees"
    assert found.whole is not None
    assert found.whole.cosine == pytest.approx(1)
    depth = tried.depth("fp32")
    assert depth.first is None
    assert len(depth.layers) >= 5
    assert all(each.alone.relative < 1e-6 for each in depth.layers)


def test_a_layer_that_is_wrong_in_one_precision_is_named(items: Any) -> None:
    tried = validation(Stub(torch.bfloat16), EagerEngine(row("bf16")), items)
    depth = tried.depth("bf16")
    assert depth.first is not None
    assert depth.first.layer.path == "body.1"


def test_an_engine_that_is_wrong_differs_and_the_layers_that_pytorch_runs_do_not(items: Any) -> None:
    tried = validation(Stub(), Wrong(row("fp32")), items)
    found = tried.compared("auto", "fp32")
    assert found.verdict == "differs"
    assert "scale is 0.5" in found.reason
    assert tried.depth("fp32").first is None


def test_the_command_names_the_layers_of_an_onnx_file_of_tensors(
    onnx_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["validate", str(onnx_file), "--device", "cpu", "--precisions", "fp32", "--engines", "onnxruntime"]
    assert main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["first_read"] == "ONNX Runtime itself computes it, so that nothing was compared"
    [layers] = found["layers"]
    assert layers["note"] == ""
    assert layers["count"] >= 5
    assert [each["verdict"] for each in found["comparisons"]] == ["agrees"]
