"""models.yolo.yolo11: the published names and shapes in every size, and which file is of which architecture."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from models.weights.checkpoint import Checkpoint
from models.yolo import model as yolo
from models.yolo.families import FAMILIES, KINDS, NAMES, architecture_of, named_in, parts_of
from models.yolo.yolo11 import YOLO11, size_of
from models.yolo.yolov8 import SIZES

# Of the publisher's descriptions (the comments in yolo11.yaml, yolo11-seg.yaml, …), all with 80 classes.
PARAMETERS = {
    ("yolov8", ""): (3_157_200, 11_166_560, 25_902_640, 43_691_520, 68_229_648),
    ("yolo11", ""): (2_624_080, 9_458_752, 20_114_688, 25_372_160, 56_966_176),
    ("yolo11", "cls"): (1_633_584, 5_545_488, 10_455_696, 12_937_104, 28_458_544),
}
CLASSES = 80


@pytest.mark.parametrize(("prefix", "kind"), PARAMETERS)
def test_every_size_has_the_published_number_of_parameters(prefix: str, kind: Any) -> None:
    family = next(each for each in FAMILIES if each.prefix == prefix)
    with torch.device("meta"):
        networks = [family.made(size, kind, CLASSES) for size in SIZES]
    counts = tuple(sum(each.numel() for each in network.parameters()) for network in networks)
    assert counts == PARAMETERS[prefix, kind]


def test_family_size_and_kind_are_told_from_the_state_dict() -> None:
    for family, size, kind in itertools.product(FAMILIES, SIZES, KINDS):
        name = f"{family.prefix}{size}{kind and '-'}{kind}"
        if name not in NAMES:
            continue  # YOLO26's classifiers are YOLO11's.
        assert parts_of(name) == (family, size, kind)
        with torch.device("meta"):
            state = family.made(size, kind, 3).state_dict()
        assert family.size_of(state) == size
        assert named_in(state, kind) == name
        assert architecture_of(state) == name
        assert yolo.fitted(name, Checkpoint(state)).class_count == 3
    assert size_of({"model.0.conv.weight": torch.empty(17, 3, 3, 3)}) is None
    assert size_of({"model.0.conv.weight": torch.empty(())}) is None
    assert size_of({}) is None


def test_attention_sees_the_whole_image() -> None:
    """A pixel in one corner changes features in the other, which convolutions and pooling alone do not reach."""
    torch.manual_seed(0)
    network = YOLO11("n", 3).eval()
    images = torch.rand(1, 3, 640, 640)
    other = images.clone()
    other[..., :32, :32] = 1 - other[..., :32, :32]
    with torch.inference_mode():
        (_, _, one), (_, _, two) = (network.features(each) for each in (images, other))
    assert (one != two)[..., -1, -1].any()
