"""models.yolo.yolov8: the same names, shapes and numbers as the reference network, in every size."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from models.yolo.yolov8 import YOLOv8

IMAGES = torch.rand(2, 3, 64, 96, generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def _two_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)


def test_fusing_removes_batch_norm_and_twice_is_once() -> None:
    network = YOLOv8("n", 3).eval()
    once = network.fuse()(IMAGES)
    assert not any(isinstance(module, nn.BatchNorm2d) for module in network.modules())
    torch.testing.assert_close(network.fuse()(IMAGES), once, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_networks_decode_in_float32(dtype: torch.dtype) -> None:
    network = YOLOv8("n", 3).eval().fuse()
    with torch.inference_mode():
        expected = network(IMAGES)
        found = network.to(dtype)(IMAGES.to(dtype))
    assert found.dtype == torch.float32
    # Not on the grid of the low precision, and near the float32 answer.
    assert (found[:, :4] != found[:, :4].to(dtype).float()).any()
    assert float((found - expected)[:, 4:].abs().max()) < 0.2
