"""Heads of classifiers in files: what a service answers is what the network itself says, whichever head it has."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from app.precision.gate import Gate
from app.precision.probes import probes
from backends import Executable, LoadReport
from tests.support.exports_of_networks import answered, opened, written

pytest.importorskip("onnx")

SIDE = 32
PIXELS = torch.full((1, SIDE, SIDE, 3), 90, dtype=torch.uint8)
SIDECAR = {"task": "classify", "resize": "stretch", "mean": [0, 0, 0], "std": [1, 1, 1]}
HEADS: dict[str, tuple[list[float], Any]] = {
    "softmax": ([4.0, 0.0, -1.0], nn.Softmax(1)),
    "sigmoid": ([4.0, 3.0, -1.0], nn.Sigmoid()),
    "logits": ([4.0, 0.0, -1.0], None),
    "one logit": ([-1.5], None),
    "one probability": ([-1.5], nn.Sigmoid()),
}


def network(bias: list[float], end: nn.Module | None) -> nn.Sequential:
    torch.manual_seed(0)
    head = nn.Linear(3, len(bias))
    head.bias.data = torch.tensor(bias)
    layers = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), head, *([] if end is None else [end])]
    return nn.Sequential(*layers).eval().requires_grad_(False)


def model_of(folder: Path, layers: nn.Module, sidecar: dict[str, Any]) -> Any:
    axes = {"dynamic_axes": {"x": {0: "n"}}, "input_names": ["x"]}
    return opened(written(folder / "m.onnx", layers, torch.rand(1, 3, SIDE, SIDE), sidecar, **axes))


def scores_of(model: Any) -> list[float]:
    found = {each["class_id"]: each["score"] for each in answered(model, PIXELS)["classes"]}
    return [found[number] for number in range(len(found))]


@pytest.mark.parametrize("head", HEADS)
def test_a_head_is_told_by_what_it_answers(tmp_path: Path, head: str, caplog: pytest.LogCaptureFixture) -> None:
    bias, end = HEADS[head]
    layers = network(bias, end)
    with caplog.at_level(logging.WARNING):
        model = model_of(tmp_path, layers, SIDECAR)
    said: Tensor = layers(PIXELS.permute(0, 3, 1, 2).float() / 255)
    if end is None:
        said = said.softmax(1) if len(bias) > 1 else said.sigmoid()
    assert scores_of(model) == pytest.approx(said[0].tolist(), abs=1e-4)
    assert model.adapter.scored_by == ("softmax" if head in ("softmax", "logits") else "sigmoid")
    assert ("as it is" in caplog.text or "as they are" in caplog.text) == (end is not None)


def test_two_labels_of_one_number_are_no_and_yes(tmp_path: Path) -> None:
    layers = network([-1.5], nn.Sigmoid())
    model = model_of(tmp_path, layers, {**SIDECAR, "labels": ["good", "defect"]})
    [[said]] = layers(PIXELS.permute(0, 3, 1, 2).float() / 255).tolist()
    assert scores_of(model) == pytest.approx([1 - said, said], abs=1e-4)


@pytest.mark.parametrize("head", ["sigmoid", "one logit", "one probability"])
def test_a_network_of_single_scores_passes_the_gate(tmp_path: Path, head: str) -> None:
    model = model_of(tmp_path, network(*HEADS[head]), SIDECAR)
    layers, report = model.network(), LoadReport("other", "fp32")

    class Other(Executable):
        """What the reference computes, all but its last digits."""

        def _execute(self, pixels: Any) -> tuple[Any, ...]:
            with torch.inference_mode():
                return tuple(each.numpy() * np.float32(1 + 1e-6) for each in layers(torch.from_numpy(pixels)))

        def _release(self) -> None: ...

    gate = Gate(model, probes(model))
    assert gate.check(Other("cpu", (1, 2), model.input_shape), report).keys() == model.limits["fp32"].keys()


@pytest.mark.parametrize("keeps", [False, True])
def test_the_number_of_a_class_is_refused(tmp_path: Path, keeps: bool) -> None:
    class Number(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = network([4.0, 0.0, -1.0], None)

        def forward(self, x: Tensor) -> Tensor:
            return torch.argmax(self.layers(x), 1, keepdim=keeps)

    with pytest.raises(Exception, match=r"the number of a class \(ArgMax\): export the network with its scores"):
        model_of(tmp_path, Number(), SIDECAR)


class ClassMap(nn.Module):
    """Of each pixel the channel that is most: [n, 1, h, w] of int64, as mmsegmentation and PaddleSeg export theirs; or
    the channels themselves, last, as TensorFlow has them.
    """

    def __init__(self, last: bool) -> None:
        super().__init__()
        self.layer, self.last = nn.Conv2d(3, 4, 1), last

    def forward(self, x: Tensor) -> Tensor:
        """float [n, 3, h, w] -> int64 [n, 1, h, w], or float [n, h, w, 4]."""
        found: Tensor = self.layer(x)
        return found.permute(0, 2, 3, 1) if self.last else found.argmax(1, keepdim=True)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("labels", [None, ["road", "car", "sky", "tree"]])
def test_a_map_has_classes_as_numbers_or_as_its_last_axis(tmp_path: Path, labels: list[str] | None, last: bool) -> None:
    layers = ClassMap(last).eval().requires_grad_(False)
    layers.layer.weight.data = torch.tensor([[9.0, 0, 0], [0, 9, 0], [0, 0, 9], [-9, -9, -9]]).reshape(4, 3, 1, 1)
    assert layers.layer.bias is not None
    layers.layer.bias.data = torch.tensor([0.0, 0.0, 0.0, 3.0])
    sidecar = {"task": "segment_semantic", "mean": 0, "std": 1, **({"labels": labels} if labels else {})}
    pixels = torch.zeros((1, SIDE, SIDE, 3), dtype=torch.uint8)
    for number in range(3):
        pixels[0, 8 * number : 8 * number + 8, :, number] = 200
    answer = answered(model_of(tmp_path, layers, sidecar), pixels)
    assert [each["class_id"] for each in answer["areas"]] == [0, 1, 2, 3]
    assert [each["share"] for each in answer["areas"]] == [0.25] * 4
    assert [each["label"] for each in answer["areas"]] == labels or [f"class {n}" for n in range(4)]


def test_a_map_of_one_probability_is_read_as_it_is(tmp_path: Path) -> None:
    layers = nn.Sequential(nn.Conv2d(3, 1, 1), nn.Sigmoid()).eval().requires_grad_(False)
    layers[0].weight.data = torch.tensor([9.0, 0, 0]).reshape(1, 3, 1, 1)
    layers[0].bias.data = torch.tensor([-4.0])
    sidecar = {"task": "segment_semantic", "mean": 0, "std": 1, "labels": ["other", "red"]}
    pixels = torch.zeros((1, SIDE, SIDE, 3), dtype=torch.uint8)
    pixels[0, :8, :, 0] = 200
    answer = answered(model_of(tmp_path, layers, sidecar), pixels)
    assert [(each["label"], each["share"]) for each in answer["areas"]] == [("other", 0.75), ("red", 0.25)]
