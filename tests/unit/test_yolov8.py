"""models.yolov8: the same names, shapes and numbers as the reference network, in every size."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from models.yolov8 import BOX_CHANNELS, SIZES, STRIDES, YOLOv8, anchors, size_of
from tests.support import reference_yolov8

SIDES = {"n": 256, "s": 192, "m": 128, "l": 128, "x": 96}
CLASS_COUNTS = (1, 7, 200)

needs_reference = pytest.mark.skipif(
    importlib.util.find_spec("ultralytics") is None, reason="ultralytics is not installed"
)


@pytest.fixture(autouse=True)
def _two_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    cases = [(size, 80, SIDES[size]) for size in SIZES] + [("n", count, 0) for count in CLASS_COUNTS]
    return reference_yolov8.networks(tmp_path_factory.mktemp("yolov8") / "networks.npz", cases)


def relative_error(ours: Tensor, theirs: Any) -> float:
    expected = torch.from_numpy(theirs)
    assert ours.shape == expected.shape
    return float((ours - expected).abs().max() / expected.abs().max())


@needs_reference
@pytest.mark.parametrize("size", SIZES)
def test_names_shapes_and_outputs_are_those_of_the_reference(size: Any, reference: dict[str, Any]) -> None:
    with torch.device("meta"):
        network = YOLOv8(size, 80).eval()
    state = network.state_dict()
    names = [f"{name} {tuple(tensor.shape)}" for name, tensor in state.items()]
    assert names == reference[f"{size}/80/names"].tolist()

    network.load_state_dict(reference_yolov8.perturbed(state), assign=True)
    images = reference_yolov8.image_batch(SIDES[size])
    for fused in (False, True):
        if fused:
            network.fuse()
        with torch.inference_mode():
            levels, decoded = network.raw(images), network(images)
        for level, raw in enumerate(levels):
            assert relative_error(raw[:, :BOX_CHANNELS], reference[f"{size}/80/boxes{level}"]) <= 1e-4
            assert relative_error(raw[:, BOX_CHANNELS:], reference[f"{size}/80/classes{level}"]) <= 1e-4
        theirs = reference[f"{size}/80/decoded"]
        assert theirs[:, :4].std() > 1  # not degenerate: there is something to compare
        assert theirs[:, 4:].std() > 0.01
        assert relative_error(decoded[:, :4], theirs[:, :4]) <= 1e-4
        assert relative_error(decoded[:, 4:], theirs[:, 4:]) <= 1e-4


@needs_reference
@pytest.mark.parametrize("class_count", CLASS_COUNTS)
def test_head_grows_with_the_classes_as_in_the_reference(class_count: int, reference: dict[str, Any]) -> None:
    state = YOLOv8("n", class_count).state_dict()
    names = [f"{name} {tuple(tensor.shape)}" for name, tensor in state.items()]
    assert names == reference[f"n/{class_count}/names"].tolist()


def test_batch_norm_is_as_published() -> None:
    layers = [module for module in YOLOv8("n", 2).modules() if isinstance(module, nn.BatchNorm2d)]
    assert {(layer.eps, layer.momentum) for layer in layers} == {(1e-3, 0.03)}


def test_fusing_removes_batch_norm_and_twice_is_once() -> None:
    network = YOLOv8("n", 3).eval()
    images = reference_yolov8.image_batch(64)
    once = network.fuse()(images)
    assert not any(isinstance(module, nn.BatchNorm2d) for module in network.modules())
    torch.testing.assert_close(network.fuse()(images), once, rtol=0, atol=0)


def test_raw_outputs_carry_gradients_to_every_weight_but_the_bins() -> None:
    network = YOLOv8("n", 3).train()
    sum(level.square().mean() for level in network.raw(reference_yolov8.image_batch(64))).backward()
    without = {name for name, weight in network.named_parameters() if weight.grad is None}
    assert without == {"model.22.dfl.conv.weight"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_networks_decode_in_float32(dtype: torch.dtype) -> None:
    network = YOLOv8("n", 3).eval()
    network.load_state_dict(reference_yolov8.perturbed(network.state_dict()))
    network.fuse()
    images = reference_yolov8.image_batch(64)
    with torch.inference_mode():
        expected = network(images)
        found = network.to(dtype)(images.to(dtype))
    assert found.dtype == torch.float32
    # Not on the grid of the low precision, and near the float32 answer.
    assert (found[:, :4] != found[:, :4].to(dtype).float()).any()
    assert float((found - expected)[:, 4:].abs().max()) < 0.2


@pytest.mark.parametrize("size", SIZES)
def test_size_is_told_from_the_state_dict(size: Any) -> None:
    with torch.device("meta"):
        state = YOLOv8(size, 2).state_dict()
    assert size_of(state) == size
    assert size_of({"model.0.conv.weight": torch.empty(17, 3, 3, 3)}) is None
    assert size_of({}) is None


def test_anchors_run_row_by_row_through_the_strides() -> None:
    centres, strides = anchors(64, 96)
    assert strides.tolist() == [8.0] * 96 + [16.0] * 24 + [32.0] * 6
    assert centres[:2].tolist() == [[0.5, 0.5], [1.5, 0.5]]
    assert (centres * strides[:, None]).amax(dim=0).tolist() == [92.0, 60.0]
    assert np.unique(strides).tolist() == list(map(float, STRIDES))
