"""Files as training and other exporters leave them: served, or refused with the line that makes them right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torchvision import models as torchvision_models

from models import ModelError, open_model, parse_spec
from models.contract.errors import UnknownModelError, WeightsError
from models.exports.layouts import decoded, interpret, resize_of
from models.exports.metadata import Description
from models.weights.checkpoint import read, read_header


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
    assert read_header(file).state.keys() == state.keys()
    found = read(file).state
    assert all(torch.equal(found[key], state[key]) for key in state)
    assert len(open_model(parse_spec(f"m=squeezenet1_1:{file}"), tmp_path).labels) == 3


PREFIXED: dict[str, Any] = {
    "of Lightning": lambda s: under("net.", s),
    "two": lambda s: under("model.net.", s),
    "beside other layers": lambda s: {**under("net.", s), "head.classifier.1.weight": torch.ones(3)},
    "student and teacher": lambda s: {**under("student.", s), **under("teacher.", s)},
    "model and its average": lambda s: {**under("model.", s), **under("ema_model.", s)},
}


@pytest.mark.parametrize("name", PREFIXED)
def test_a_network_under_any_one_prefix_is_found(name: str, state: dict[str, torch.Tensor], tmp_path: Path) -> None:
    torch.save({"state_dict": PREFIXED[name](state)}, tmp_path / "a.ckpt")
    spec = parse_spec(f"m=squeezenet1_1:{tmp_path}/a.ckpt")
    if " and " in name:
        said = r"there 2 times.* prefixes '\w+\.', '\w+\.': save the state_dict\(\)"
        with pytest.raises(WeightsError, match=said) as raised:
            open_model(spec, tmp_path)
        assert "onnx" not in str(raised.value)
        return
    model: Any = open_model(spec, tmp_path)
    loaded = model.network().core.state_dict()
    assert all(torch.equal(loaded[key], state[key].float()) for key in state)


def test_a_head_of_ones_own_is_told_to_be_exported(state: dict[str, torch.Tensor], tmp_path: Path) -> None:
    other = {name.replace("classifier.1.", "classifier.1.0."): tensor for name, tensor in state.items()}
    torch.save(other, tmp_path / "head.pth")
    with pytest.raises(WeightsError, match=r'classifier\.1\.weight is missing.*torch\.onnx\.export\(.*"head\.onnx"'):
        open_model(parse_spec(f"m=squeezenet1_1:{tmp_path}/head.pth"), tmp_path)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["TorchScript", "torch.export"])
def test_a_program_under_another_name_is_told_its_own(kind: str, tmp_path: Path) -> None:
    if kind == "TorchScript":
        torch.jit.save(torch.jit.trace(torch.nn.ReLU(), torch.rand(1)), str(tmp_path / "mine.pt"))
    else:
        torch.export.save(torch.export.export(torch.nn.ReLU(), (torch.rand(1),)), tmp_path / "mine.pt")
    suffix = "ts" if kind == "TorchScript" else "pt2"
    said = rf"mine\.pt is a program of {kind}, not weights: name it mine\.{suffix}"
    with pytest.raises(WeightsError, match=said.replace("program of TorchScript", "TorchScript program")):
        open_model(parse_spec(f"{tmp_path}/mine.pt"), tmp_path)


def test_of_several_states_the_log_says_which_is_served(
    state: dict[str, torch.Tensor], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    averaged = {"n_averaged": torch.tensor(1), **under("module.", state)}
    torch.save({"model": state, "model_ema": averaged, "best": averaged, "epoch": 3}, tmp_path / "a.pth")
    with caplog.at_level("INFO"):
        open_model(parse_spec(f"m=squeezenet1_1:{tmp_path}/a.pth"), tmp_path)
    assert [line for line in caplog.messages if "(model_ema, model, best): model_ema is served" in line]


@pytest.mark.parametrize("name", ["fasterrcnn_mobilenet_v3_large_320_fpn", "ssd300_vgg16", "deeplabv3_resnet50"])
def test_a_network_of_torchvision_that_is_exported_first_is_told_how(name: str) -> None:
    with pytest.raises(UnknownModelError, match=r"of torchvision, .*torch\.onnx\.export\(.*dynamo=False"):
        parse_spec(f"cars={name}:a.pth")
    with pytest.raises(ModelError, match="did you mean"):
        parse_spec("resnet5")


# Suppression inside

BOXES = torch.tensor([[[10.0, 20, 30, 40], [50, 60, 70, 80], [1, 2, 3, 4]]])
SCORES = torch.tensor([[0.9, 0.5, 0.4]])
CLASSES = torch.tensor([[2, 0, 1]])
LABELS = ("a", "b", "c")


def found(layout: Any, *outputs: torch.Tensor) -> list[Any]:
    about = Description(task="detect", takes="boxes", labels=LABELS, layout=layout)
    how = interpret(about, [list(each.shape) for each in outputs], (96, 96))
    assert how.suppressed
    boxes, scores, classes = decoded(how, outputs, (96, 96))
    return [boxes.tolist(), scores.tolist(), classes.tolist(), how.layout, resize_of(about, how)]


@pytest.mark.parametrize("stated", [None, "mmdeploy"])
def test_boxes_of_mmdeploy_are_read(stated: Any) -> None:
    outputs = torch.cat((BOXES, SCORES[..., None]), 2), CLASSES
    assert found(stated, *outputs) == [BOXES.tolist(), SCORES.tolist(), CLASSES.tolist(), "mmdeploy", "top-left"]


@pytest.mark.parametrize("stated", [None, "end2end"])
def test_boxes_behind_the_stated_number_are_none(stated: Any) -> None:
    outputs = torch.tensor([[2]], dtype=torch.int32), BOXES, SCORES, CLASSES.int()
    right = [[SCORES[0, 0].item(), SCORES[0, 1].item(), 0.0]]
    assert found(stated, *outputs) == [BOXES.tolist(), right, CLASSES.tolist(), "end2end", "letterbox"]


def test_outputs_of_another_form_are_refused_with_the_one_that_fits() -> None:
    with pytest.raises(ValueError, match=r"\[n, k, 5\] and \[n, k\] \(mmdeploy\)"):
        found("end2end", torch.cat((BOXES, SCORES[..., None]), 2), CLASSES)
