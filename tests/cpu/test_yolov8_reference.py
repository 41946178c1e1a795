"""models.yolo.yolov8 has the names, shapes and numbers of the reference network, in every size."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from torch import Tensor

from models.yolo.yolov8 import BOX_CHANNELS, SIZES, YOLOv8
from tests.support import reference_yolov8

SIDES = {"n": 256, "s": 192, "m": 128, "l": 128, "x": 96}


CLASS_COUNTS = (1, 7, 200)


needs_reference = pytest.mark.skipif(
    importlib.util.find_spec("ultralytics") is None, reason="ultralytics is not installed"
)


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
    network.double()
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
