"""int8 convolutions by cuDNN: which suit its kernels, and the wheel's Python up to the driver."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks.gpu.cudnn import graph_of, ranges

CASES = [(32, 48, 3, 2, 1), (64, 32, 1, 1, 0)]
"""Channels in and out, kernel, stride, padding."""


def convolution(case: tuple[int, int, int, int, int], bias: bool = True) -> nn.Conv2d:
    torch.manual_seed(0)
    return nn.Conv2d(*case, bias=bias).requires_grad_(False)


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
