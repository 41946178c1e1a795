"""int8 convolutions by cuDNN: their arithmetic with a double of its Python, and the wheel's Python up to the driver."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from backends.engines import ENGINES
from benchmarks.gpu.cudnn import CudnnEngine, Int8Convolution, graph_of, ranges

CASES = [(32, 48, 3, 2, 1), (64, 32, 1, 1, 0)]
"""Channels in and out, kernel, stride, padding."""


def convolution(case: tuple[int, int, int, int, int], bias: bool = True) -> nn.Conv2d:
    torch.manual_seed(0)
    return nn.Conv2d(*case, bias=bias).requires_grad_(False)


class Tensor:
    """A tensor of a graph: what makes it of the tensors that are given."""

    def __init__(self, shape: Any, make: Any = None) -> None:
        self.shape, self.make, self.kind = list(shape), make, ""

    def get_dim(self) -> list[int]:
        return self.shape

    def set_data_type(self, kind: str) -> Tensor:
        self.kind = kind
        return self

    def set_output(self, is_output: bool) -> Tensor:
        return self

    def set_dim(self, dim: list[int]) -> Tensor:
        assert dim == self.shape
        return self

    def set_stride(self, stride: list[int]) -> Tensor:
        return self


class Graph:
    """cuDNN's graph on the CPU: the operations that are asked for, with whole numbers where those are."""

    def __init__(self, **types: Any) -> None:
        self.types = types

    def tensor(self, name: str, dim: Any, stride: Any, data_type: str) -> Tensor:
        assert stride == list(torch.empty(dim).contiguous(memory_format=torch.channels_last).stride()) or 1 in dim
        return Tensor(dim).set_data_type(data_type)

    def conv_fprop(self, image: Tensor, weight: Tensor, compute_data_type: str, **sides: Any) -> Tensor:
        assert (image.kind, weight.kind, compute_data_type) == ("INT8", "INT8", "INT32")

        def make(given: Any) -> torch.Tensor:
            return nn.functional.conv2d(given[image].double(), given[weight].double(), None, **sides)

        shape = make({each: torch.zeros(each.shape) for each in (image, weight)}).shape
        return Tensor(shape, make)

    def mul(self, a: Tensor, b: Tensor) -> Tensor:
        return Tensor(a.shape, lambda given: a.make(given) * given[b])

    def add(self, a: Tensor, b: Tensor) -> Tensor:
        return Tensor(a.shape, lambda given: a.make(given) + given[b])

    def build(self, modes: Any) -> None:
        pass

    def get_workspace_size(self) -> int:
        return 0

    def execute(self, given: dict[Tensor, torch.Tensor], workspace: torch.Tensor, handle: Any) -> None:
        [out] = [each for each in given if each.make]
        given[out].copy_(out.make(given))


KINDS = SimpleNamespace(**{name: name for name in ("INT8", "INT32", "FLOAT", "HALF")})
DOUBLE = SimpleNamespace(
    data_type=KINDS,
    heur_mode=SimpleNamespace(A=0, FALLBACK=1),
    pygraph=Graph,
    create_handle=lambda: "handle",
    set_stream=lambda handle, stream: None,
)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_it_is_the_convolution_within_a_step_of_int8(case: Any, bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=0))
    of = convolution(case, bias)
    x = torch.randn(2, case[0], 14, 10)
    expected = of(x)
    ours = Int8Convolution(DOUBLE, of, float(x.abs().max())).half()
    assert {name: each.dtype for name, each in ours.named_buffers()} == {
        "weight": torch.int8,
        "scale": torch.float32,
        "bias": torch.float32,
    }
    found = ours(x.half()).float()
    assert found.shape == expected.shape
    error = (found - expected).abs().mean() / expected.abs().mean()
    assert 0 < error < 0.03


def test_ranges_are_of_convolutions_whose_channels_suit_the_kernels() -> None:
    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.last = (
                convolution((3, 16, 3, 1, 1)),
                convolution((16, 32, 3, 1, 1)),
                convolution((32, 7, 1, 1, 0)),
            )

        def forward(self, pixels: torch.Tensor) -> torch.Tensor:
            x = self.first(pixels.permute(0, 3, 1, 2) / 255)
            last: torch.Tensor = self.last(self.second(x))
            return last

    pixels = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (9, 8, 8, 3), dtype=np.uint8))
    network = Network()
    found = ranges(network, pixels)
    first = network.first(pixels.permute(0, 3, 1, 2) / 255).abs().max()
    assert list(found) == ["second"]
    assert found["second"][0] is network.second
    assert found["second"][1] == pytest.approx(float(first))
    assert not network.second._forward_pre_hooks


def test_nobody_is_offered_it() -> None:
    assert CudnnEngine.name not in ENGINES


@pytest.mark.skipif(importlib.util.find_spec("cudnn") is None, reason="pip install nvidia-cudnn-frontend")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_wheels_python_takes_these_calls(case: Any) -> None:
    api = importlib.import_module("cudnn")
    of = convolution(case)
    graph, tensors = graph_of(api, of, (2, case[0], 14, 10), None)
    assert tensors[-1].get_dim() == list(of(torch.zeros(2, case[0], 14, 10)).shape)
    for name in ("build", "get_workspace_size", "execute"):
        assert callable(getattr(graph, name))
    assert callable(api.create_handle)
    assert callable(api.set_stream)
    assert api.heur_mode.A != api.heur_mode.FALLBACK
