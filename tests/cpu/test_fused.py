"""Fused layers with kernels of our own in the place of cuDNN's: what is found, and when it is left out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
from torch import Tensor, nn
from torch.nn import functional

from backends.engines import fused
from models import open_model, parse_spec
from tests.support.anchors import by_anchor

Calls = Counter[str]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Calls]:
    """How often each kernel was called; they compute what the real ones do."""
    counted: Calls = Counter()

    def relu(x: Tensor, weight: Tensor, bias: Tensor, *placed: Any) -> Tensor:
        counted["relu"] += 1
        return functional.conv2d(x, weight, bias, *placed).relu()

    def add_relu(x: Tensor, weight: Tensor, z: Tensor, alpha: float, bias: Tensor, *placed: Any) -> Tensor:
        y = functional.conv2d(x, weight, bias, *placed)
        assert y.shape == z.shape
        counted["add_relu"] += 1
        return (y + alpha * z).relu()

    def silu(x: Tensor, bias: Tensor) -> Tensor:
        counted["silu"] += 1
        return functional.silu(x + bias)

    monkeypatch.setattr(torch, "cudnn_convolution_relu", relu)
    monkeypatch.setattr(torch, "cudnn_convolution_add_relu", add_relu)
    monkeypatch.setattr(fused, "_biased_silu", lambda: silu)
    fused._works.cache_clear()
    yield counted
    fused._works.cache_clear()


def fuse(network: nn.Module, x: Tensor, times_s: list[float]) -> bool:
    """With the next of `times_s` as what each run takes."""

    def run_s() -> float:
        with torch.inference_mode():
            network(x)
        return times_s.pop(0)

    return fused.fuse(network, run_s, "cpu", torch.float32)


def flat(outputs: Any) -> list[Tensor]:
    return [outputs] if isinstance(outputs, Tensor) else [each for output in outputs for each in flat(output)]


def answers(network: nn.Module, x: Tensor) -> list[Tensor]:
    with torch.inference_mode():
        return flat(network(x))


def network_of(name: str) -> tuple[nn.Module, Tensor]:
    model = open_model(parse_spec(f"{name}:sample"), Path(), allow_download=False)
    network = model.network()
    generator = torch.Generator().manual_seed(1)
    return network, torch.randint(0, 256, (2, *model.input_shape), generator=generator).to(torch.uint8)


@pytest.mark.parametrize(
    ("name", "expected"), [("resnet50", {"relu": 33, "add_relu": 16}), ("yolov8n", {"silu": 57})], ids=str
)
def test_our_networks_have_every_such_layer_fused_and_answer_alike(
    name: str, expected: dict[str, int], calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("models.yolo.model.MOST_ANCHORS", 100_000)  # All: rounding also says which is the last of some.
    network, x = network_of(name)
    before = answers(network, x)
    assert fuse(network, x, [1, 2])
    calls.clear()
    for ours, plain in zip(by_anchor(answers(network, x)), by_anchor(before), strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-4)
    assert dict(calls) == expected


@pytest.mark.parametrize(
    "name", ["googlenet", "densenet121", "regnet_x_400mf", "squeezenet1_0", "mobilenet_v2", "vit_b_32"]
)
def test_networks_of_other_makers_answer_alike(name: str, calls: Calls) -> None:
    torch.manual_seed(0)
    named = {"init_weights": False} if name == "googlenet" else {}
    network = nn.Sequential(torchvision.models.get_model(name, **named)).eval().requires_grad_(False)
    x = torch.rand(1, 3, 224, 224)
    before = answers(network, x)
    fuse(network, x, [1, 2])
    for ours, plain in zip(answers(network, x), before, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-4)


def test_what_is_not_faster_is_taken_out(calls: Calls) -> None:
    network, x = network_of("resnet50")
    modules = dict(network.named_modules())
    assert not fuse(network, x, [2, 1])
    assert dict(network.named_modules()) == modules


def test_a_kernel_that_answers_otherwise_is_not_used(monkeypatch: pytest.MonkeyPatch, calls: Calls) -> None:
    monkeypatch.setattr(torch, "cudnn_convolution_relu", functional.conv2d)
    network, x = network_of("resnet50")
    assert fuse(network, x, [1, 2])
    calls.clear()
    answers(network, x)
    assert dict(calls) == {"add_relu": 16}


class Sums(nn.Module):
    """Sums that are no kernel's: of sides of other shapes, of a number, of a convolution that others use, too."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(3, 4, 3, padding=1)
        self.bare = nn.Conv2d(3, 4, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        used = self.right(x)
        repeated = functional.relu(self.left(x) + used.mean(dim=(2, 3), keepdim=True))
        return repeated, functional.relu(self.left(x) + 1), functional.relu(used), used, functional.relu(self.bare(x))


def test_sums_and_convolutions_that_have_no_such_kernel_answer_as_before(calls: Calls) -> None:
    torch.manual_seed(0)
    network = nn.Sequential(Sums()).requires_grad_(False).double()
    x = torch.rand(2, 3, 8, 8, dtype=torch.float64)
    before = answers(network, x)
    assert fuse(network, x, [1, 2])
    for ours, plain in zip(answers(network, x), before, strict=True):
        torch.testing.assert_close(ours, plain)
    assert calls["add_relu"] == 1  # The trial's own.
