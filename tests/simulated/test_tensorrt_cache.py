"""torch_tensorrt's own key of a kept engine (`get_hash`), run from its wheel as it is: what it cannot tell apart.

So each network, precision, GPU and version has a folder of its own (backends/engines/tensorrt.py). TensorRT itself is
replaced: the network that was exported is handed back.
"""

from __future__ import annotations

import ast
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchvision.models.resnet import Bottleneck, ResNet

from backends import CompileOptions
from backends.engines.tensorrt import TensorRTEngine
from tests.support.rows import row
from tests.support.vendor_sources import sources

SIZES = (1, 2)


class Network(nn.Module):
    """A classifier as ResNet-50 is made, of one block a stage."""

    input_shape = (32, 32, 3)

    def __init__(self, classes: int, width: int = 64, groups: int = 1, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.core = ResNet(Bottleneck, [1, 1, 1, 1], num_classes=classes, width_per_group=width, groups=groups).eval()

    def cast(self, dtype: torch.dtype) -> Network:
        self.core.to(dtype)
        return self

    def forward(self, pixels: Tensor) -> tuple[Tensor, ...]:
        images = (pixels.permute(0, 3, 1, 2) / 255).to(next(self.core.parameters()).dtype)
        return (self.core(images).float(),)


@dataclass
class Kept:
    """What one engine would be kept by: torch_tensorrt's folder, and its own key in there."""

    folder: str
    key: str


def module(name: str, **attributes: object) -> ModuleType:
    made = ModuleType(name)
    vars(made).update(attributes)
    return made


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> list[Kept]:
    """Of every engine that is compiled, in order."""
    texts = dict(sources("torch_tensorrt").texts())
    settings = ast.parse(texts["torch_tensorrt/dynamo/_settings.py"])
    invariant = next(
        ast.literal_eval(node.value)
        for node in settings.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_SETTINGS_TO_BE_ENGINE_INVARIANT"
    )
    found: list[Kept] = []

    def compiled(exported: Any, arg_inputs: tuple[Tensor, ...], **options: Any) -> nn.Module:
        chosen = SimpleNamespace(**{name: options.get(name) for name in invariant})
        specs = [f"Input(shape={tuple(each.shape)}, dtype={each.dtype})" for each in arg_inputs]
        made = exported.module()
        found.append(Kept(options["engine_cache_dir"], cache.BaseEngineCache.get_hash(made, specs, chosen)))
        run = nn.Sequential()
        run.add_module("_run_on_acc_0", made)
        return run

    for stub in (
        module("torch_tensorrt", __path__=[], dynamo=SimpleNamespace(compile=compiled)),
        module("torch_tensorrt._Input", Input=object),
        module("torch_tensorrt.dynamo", __path__=[]),
        module(
            "torch_tensorrt.dynamo._settings",
            _SETTINGS_TO_BE_ENGINE_INVARIANT=invariant,
            CompilationSettings=SimpleNamespace,
        ),
    ):
        monkeypatch.setitem(sys.modules, stub.__name__, stub)
    cache: Any = module("torch_tensorrt.dynamo._engine_cache")
    exec(compile(texts["torch_tensorrt/dynamo/_engine_cache.py"], "_engine_cache.py", "exec"), vars(cache))
    return found


def test_what_its_key_cannot_tell_apart_lies_in_folders_of_its_own(kept: list[Kept], tmp_path: Path) -> None:
    """Architecture, classes, weights and precision make the folder; within it the batch size makes the key."""
    made = [
        (Network(10), "fp32"),
        (Network(1000), "fp32"),
        (Network(10, width=128), "fp32"),
        (Network(10, width=4, groups=32), "fp32"),
        (Network(10, seed=1), "fp32"),
        (Network(10), "bf16"),
    ]
    for network, precision in made:
        engine = TensorRTEngine(row(precision))
        engine.compile(network, "cpu", precision, SIZES, CompileOptions(cache_dir=tmp_path)).close()
    assert len(kept) == len(made) * len(SIZES)
    in_fp32 = kept[: -len(SIZES)]
    assert len({each.key for each in in_fp32}) == len(SIZES), "by its own key only the batch size differs"
    assert len({each.folder for each in kept}) == len(made)
    assert len({(each.folder, each.key) for each in kept}) == len(kept)
