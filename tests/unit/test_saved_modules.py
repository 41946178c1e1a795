"""Networks that were saved whole: another activation, stride or pool than ours is refused by its path."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchvision import models as torchvision_models

from models import open_model, parse_spec
from models.contract.errors import WeightsError
from models.weights.modules import SavedModule, check_modules
from models.yolo.model import YOLO

CHANGES: dict[str, tuple[Callable[[Any], object], str]] = {
    "no pool": (lambda network: setattr(network, "maxpool", nn.Identity()), "maxpool is Identity and not MaxPool2d"),
    "pool": (lambda network: setattr(network.maxpool, "kernel_size", 5), "maxpool has kernel_size 5"),
    "activation": (lambda network: setattr(network.conv5, "2", nn.LeakyReLU()), "2 is LeakyReLU and not ReLU"),
    "stride": (lambda network: setattr(network.conv1[0], "stride", (1, 1)), r"conv1.0 has stride \(1, 1\)"),
    "eps": (lambda network: setattr(network.conv1[1], "eps", 0.5), "conv1.1 has eps 0.5"),
    "edges": (lambda network: setattr(network.conv1[0], "padding_mode", "reflect"), "has padding_mode reflect"),
}


@pytest.mark.parametrize("under", ["", "module", "net"])
@pytest.mark.parametrize("change", [None, *CHANGES])
def test_a_network_that_was_changed_is_refused(change: str | None, under: str, tmp_path: Path) -> None:
    network = torchvision_models.shufflenet_v2_x0_5(weights=None, num_classes=3)
    if change is not None:
        CHANGES[change][0](network)
    path = tmp_path / "whole.pth"
    torch.save({"model": nn.ModuleDict({under: network}) if under else network, "epoch": 3}, path)
    spec = parse_spec(f"x=shufflenet_v2_x0_5:{path}")
    if change is None:
        assert len(open_model(spec, tmp_path / "cache").labels) == 3
        return
    with pytest.raises(WeightsError, match=f"is not shufflenet_v2_x0_5: its .*{CHANGES[change][1]}.*served from an"):
        open_model(spec, tmp_path / "cache")


@pytest.mark.parametrize("name", ["0", "model", "module", "net"])
def test_what_computes_beside_a_network_is_not_left_out(name: str, tmp_path: Path) -> None:
    network = torchvision_models.shufflenet_v2_x0_5(weights=None, num_classes=3)
    parts = nn.Sequential() if name == "0" else nn.ModuleDict()
    parts.add_module(name, network)
    for beside, said in ((nn.Dropout(), ""), (nn.Sigmoid(), "is more than shufflenet_v2_x0_5: its last is Sigmoid")):
        parts.add_module("last", beside)
        torch.save(parts, tmp_path / "whole.pth")
        spec = parse_spec(f"x=shufflenet_v2_x0_5:{tmp_path}/whole.pth")
        if not said:
            assert len(open_model(spec, tmp_path / "cache").labels) == 3
            continue
        with pytest.raises(WeightsError, match=said):
            open_model(spec, tmp_path / "cache")


@pytest.mark.parametrize(
    ("path", "name", "facts", "said"),
    [
        ("model.2.m.0", "ultralytics.nn.modules.block.Bottleneck", {"add": True}, ""),
        ("model.2.m.0", "ultralytics.nn.modules.block.Bottleneck", {"add": False}, "does not add its input"),
        ("model.21.m.0", "ultralytics.nn.modules.block.Bottleneck", {"add": True}, "adds its input"),
        ("model.0.act", "torch.nn.modules.activation.SiLU", {}, ""),
        ("model.0.act", "torch.nn.modules.activation.ReLU", {}, "is ReLU and not SiLU"),
        ("model.9.m", "torch.nn.modules.pooling.MaxPool2d", {"kernel_size": (5, 5), "padding": 2, "dilation": 1}, ""),
        (
            "model.9.m",
            "torch.nn.modules.pooling.MaxPool2d",
            {"kernel_size": 3, "padding": 1},
            "has kernel_size 3 and has",
        ),
        ("model.10", "torch.nn.modules.upsampling.Upsample", {"scale_factor": 2.0, "mode": "nearest"}, ""),
        ("model.10", "torch.nn.modules.upsampling.Upsample", {"mode": "bilinear"}, "has mode bilinear"),
        ("model.10", "ultralytics.nn.modules.conv.Concat", {}, ""),
        ("criterion.bce", "torch.nn.modules.loss.BCEWithLogitsLoss", {}, ""),
        ("model.22.more", "torch.nn.modules.activation.Hardswish", {}, "is Hardswish"),
        ("model.23.flow_model.s.5", "torch.nn.modules.activation.Tanh", {}, ""),
    ],
)
def test_what_ultralytics_saves_is_compared_by_its_path(path: str, name: str, facts: dict[str, Any], said: str) -> None:
    network = YOLO.of("x", "yolov8n", ("one",), "random", None, size=(64, 64)).network().core
    if not said:
        check_modules("yolov8n", {path: SavedModule(name, facts)}, network, {})
        return
    with pytest.raises(WeightsError, match=f"its {path} {said}"):
        check_modules("yolov8n", {path: SavedModule(name, facts)}, network, {})
