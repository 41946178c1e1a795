"""Files as training leaves them: served, or refused with the line that makes them right."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchvision import models as torchvision_models

from models import open_model, parse_spec
from models.contract.errors import WeightsError
from models.weights.checkpoint import SavedModule, read
from models.weights.state import check_modules
from models.yolo.model import YOLO


@pytest.fixture(scope="module")
def state() -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return torchvision_models.squeezenet1_1(num_classes=3).half().state_dict()


def under(prefix: str, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {prefix + name: tensor for name, tensor in state.items()}


WRAPPED: dict[str, Any] = {
    "plain.pth": lambda s: s,
    "ddp.pth": lambda s: under("module.", s),
    "compiled.pth": lambda s: under("_orig_mod.", s),
    "compiled_ddp.pth": lambda s: under("module._orig_mod.", s),
    "ddp_compiled.pth": lambda s: under("_orig_mod.module.", s),
    "lightning.pth": lambda s: {"state_dict": under("model.", s), "epoch": 3},
    "last.ckpt": lambda s: {"state_dict": {**under("model._orig_mod.", s), "loss.weight": torch.ones(3)}},
    "compiled_part.pth": lambda s: {key.replace("features.", "features._orig_mod."): s[key] for key in s},
    "fsdp.pth": lambda s: {key.replace(".squeeze.", "._fsdp_wrapped_module.squeeze."): s[key] for key in s},
    "averaged.pth": lambda s: {"n_averaged": torch.tensor(3), **under("module.", s)},
    "model_best.pth.tar": lambda s: {"epoch": 1, "state_dict": under("module.", s)},
    "pytorch_model.bin": lambda s: s,
    "pytorch_cifar.pth": lambda s: {"net": s, "acc": 93.1, "epoch": 5, "rng": {"torch": torch.ones(3)}},
    "raw_and_averaged.pth": lambda s: {"state_dict": {key: s[key] + 1 for key in s}, "ema_state_dict": s},
}


@pytest.mark.parametrize("name", WRAPPED)
def test_what_wraps_a_network_in_training_is_taken_off(
    name: str, state: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    file = tmp_path / name
    torch.save(WRAPPED[name](state), file)
    assert read(file, with_data=False).state.keys() == state.keys()
    found = read(file).state
    assert all(torch.equal(found[key], state[key]) for key in state)
    assert len(open_model(parse_spec(f"m=squeezenet1_1:{file}"), tmp_path).labels) == 3


PREFIXED: dict[str, Any] = {
    "of Lightning": lambda s: under("net.", s),
    "two": lambda s: {**under("model.net.", s), "ce_loss.weight": torch.ones(3)},
    "beside training": lambda s: {**under("swa.module.", s), "swa.n_averaged": torch.ones(1)},
    "within layers": lambda s: {**under("net.", s), "head.classifier.1.weight": torch.ones(3)},
    "within a scale": lambda s: {**under("model.net.", s), "model.mean": torch.ones(3), "criterion.a": torch.ones(3)},
    "student and teacher": lambda s: {**under("student.", s), **under("teacher.", s)},
    "model and its average": lambda s: {**under("model.", s), **under("ema_model.", s)},
}


@pytest.mark.parametrize("name", PREFIXED)
def test_a_network_under_any_one_prefix_is_found(name: str, state: dict[str, torch.Tensor], tmp_path: Path) -> None:
    torch.save({"state_dict": PREFIXED[name](state)}, tmp_path / "a.ckpt")
    spec = parse_spec(f"m=squeezenet1_1:{tmp_path}/a.ckpt")
    refused = {
        "within": r"under 'net\.', which also has (head\.classifier\.1\.weight|mean)\.",
        "and": r"there 2 times.* prefixes '\w+\.', '\w+\.': save the state_dict\(\)",
    }
    for word in refused.keys() & name.split():
        with pytest.raises(WeightsError, match=refused[word]) as raised:
            open_model(spec, tmp_path)
        assert ("size: torch.onnx" in str(raised.value)) is (word == "within")
        return
    model: Any = open_model(spec, tmp_path)
    loaded = model.network().core.state_dict()
    assert all(torch.equal(loaded[key], state[key].float()) for key in state)


CHANGES: dict[str, tuple[Callable[[Any], object], str]] = {
    "no pool": (lambda network: setattr(network, "maxpool", nn.Identity()), "maxpool is Identity and not MaxPool2d"),
    "pool": (lambda network: setattr(network.maxpool, "kernel_size", 5), "maxpool has kernel_size 5"),
    "activation": (lambda network: setattr(network.conv5, "2", nn.LeakyReLU()), "2 is LeakyReLU and not ReLU"),
    "stride": (lambda network: setattr(network.conv1[0], "stride", (1, 1)), r"conv1.0 has stride \(1, 1\)"),
    "eps": (lambda network: setattr(network.conv1[1], "eps", 0.5), "conv1.1 has eps 0.5"),
    "edges": (lambda network: setattr(network.conv1[0], "padding_mode", "reflect"), "has padding_mode reflect"),
    "indices": (lambda network: setattr(network.maxpool, "return_indices", True), "maxpool has return_indices True"),
    "block": (lambda network: setattr(network.stage2[1], "stride", 2), "stage2.1 has stride 2"),
    "one more": (lambda network: network.conv5.append(nn.Sequential(nn.SiLU(), nn.AvgPool2d(1))), "conv5.3.. is "),
    "one less": (lambda network: network.conv5.pop(2), "no conv5.2, a ReLU"),
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
    with pytest.raises(WeightsError, match=f"is .* shufflenet_v2_x0_5: it.*{CHANGES[change][1]}.*served from an"):
        open_model(spec, tmp_path / "cache")


def test_a_head_that_was_replaced_leaves_its_network_s_number_of_classes(tmp_path: Path) -> None:
    network: Any = torchvision_models.squeezenet1_1(weights=None, num_classes=3)
    network.num_classes = 1000
    torch.save(network, tmp_path / "whole.pth")
    assert len(open_model(parse_spec(f"x=squeezenet1_1:{tmp_path / 'whole.pth'}"), tmp_path / "cache").labels) == 3


def test_a_network_beside_the_one_that_is_served_is_warned_of(
    state: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    torch.save({"net": {"state_dict": state, "ema_weights": state}, "epoch": 3}, tmp_path / "a.pth")
    open_model(parse_spec(f"x=squeezenet1_1:{tmp_path / 'a.pth'}"), tmp_path / "cache")
    [said] = [each.getMessage() for each in caplog.records if "several state dicts" in each.getMessage()]
    assert "(state_dict, ema_weights): state_dict is served; for another one, torch.save" in said


@pytest.mark.parametrize("under", ["", "module", "net"])
@pytest.mark.parametrize("transforms", [True, False])
def test_a_network_that_was_saved_whole_normalises_as_it_did(
    transforms: bool, under: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    network = torchvision_models.googlenet(
        weights=None, num_classes=3, aux_logits=False, transform_input=transforms, init_weights=False
    )
    torch.save({"model": nn.ModuleDict({under: network}) if under else network}, tmp_path / "whole.pth")
    served: Any = open_model(parse_spec(f"x=googlenet:{tmp_path / 'whole.pth'}"), tmp_path / "cache")
    assert served.network().core.transform_input is transforms
    torch.save(network.state_dict(), tmp_path / "state.pth")
    open_model(parse_spec(f"x=googlenet:{tmp_path / 'state.pth'}"), tmp_path / "cache")
    assert caplog.text.count("transform_input, which is taken as True") == 1


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


@functools.cache
def core(architecture: str) -> Any:
    return YOLO.of("x", architecture, ("one",), "random", None, size=(64, 64)).network().core


@pytest.mark.parametrize(
    ("path", "name", "facts", "said"),
    [
        ("model.2.m.0", "ultralytics.nn.modules.block.Bottleneck", {"add": True}, ""),
        ("model.2.m.0", "ultralytics.nn.modules.block.Bottleneck", {"add": False}, "does not add its input"),
        ("model.21.m.0", "ultralytics.nn.modules.block.Bottleneck", {"add": True}, "adds its input"),
        ("model.0.act", "torch.nn.modules.activation.SiLU", {}, ""),
        ("model.0.act", "torch.nn.modules.activation.ReLU", {}, "is ReLU and not SiLU"),
        ("model.9.m", "torch.nn.modules.pooling.MaxPool2d", {"kernel_size": (5, 5), "padding": 2, "dilation": 1}, ""),
        ("model.9.m", "torch.nn.modules.pooling.MaxPool2d", {"kernel_size": 3, "padding": 1}, "has kernel_size 3 and"),
        ("model.10", "torch.nn.modules.upsampling.Upsample", {"scale_factor": 2.0, "mode": "nearest"}, ""),
        ("model.10", "torch.nn.modules.upsampling.Upsample", {"mode": "bilinear"}, "has mode bilinear"),
        ("model.10", "ultralytics.nn.modules.conv.Concat", {}, ""),
        ("criterion.bce", "torch.nn.modules.loss.BCEWithLogitsLoss", {}, ""),
        ("model.22.more", "torch.nn.modules.activation.Hardswish", {}, "is Hardswish"),
        ("model.23.flow_model.s.5", "torch.nn.modules.activation.Tanh", {}, ""),
        ("model.9.pool", "torch.nn.modules.pooling.AdaptiveAvgPool2d", {"output_size": 1}, ""),
        ("model.9.pool", "torch.nn.modules.pooling.AdaptiveMaxPool2d", {"output_size": 1}, "is AdaptiveMaxPool2d"),
    ],
)
def test_what_ultralytics_saves_is_compared_by_its_path(path: str, name: str, facts: dict[str, Any], said: str) -> None:
    of_path = {"flow_model": "yolo26n-pose", "pool": "yolov8n-cls"}
    architecture = next((of_path[part] for part in path.split(".") if part in of_path), "yolov8n")
    network = core(architecture)
    if not said:
        check_modules("yolov8n", {path: SavedModule(name, facts)}, network, {})
        return
    with pytest.raises(WeightsError, match=f"its {path} {said}"):
        check_modules("yolov8n", {path: SavedModule(name, facts)}, network, {})


@pytest.mark.parametrize("legacy", [False, True])
def test_weights_of_a_network_that_can_be_quantised_are_refused_where_it_has_other_layers(
    tmp_path: Path, legacy: bool
) -> None:
    """Their names and shapes are the same; mobilenet_v2's has ReLU for ReLU6. A resnet's has nothing else."""
    for name, file in (("mobilenet_v2", "a.pth"), ("resnet18", "b.pth")):
        state = getattr(torchvision_models.quantization, name)(weights=None, num_classes=2).state_dict()
        torch.save({"state_dict": state}, tmp_path / file, _use_new_zipfile_serialization=not legacy)
    with pytest.raises(WeightsError, match=r"a\.pth is of torchvision's quantisable mobilenet_v2, whose ReLU"):
        open_model(parse_spec(f"x=mobilenet_v2:{tmp_path / 'a.pth'}"), tmp_path)
    assert len(open_model(parse_spec(f"x=resnet18:{tmp_path / 'b.pth'}"), tmp_path).labels) == 2
