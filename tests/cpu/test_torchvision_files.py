"""Files of torchvision's detectors as image models: sidecars, labels, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from models import WeightsError
from tests.support.exports_of_networks import answered, opened, written

pytest.importorskip("onnx")


class Found(nn.Module):
    """As torchvision's detectors: an image without a batch in, as many boxes, scores and labels out as it finds."""

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        places = (image[0] > 0.5).nonzero()
        boxes = torch.cat((places.flip(1), places.flip(1) + 1), dim=1).float()
        return boxes, boxes[:, 0] / 64, places[:, 1] % 2 + 1


def model_of(folder: Path, beside: dict[str, Any] | None) -> Any:
    return opened(written(folder / "best.onnx", Found(), torch.rand(3, 48, 64), beside))


@pytest.mark.parametrize(
    ("beside", "labels"),
    [
        (None, ["class 2", "class 1"]),
        ({"task": "detect", "labels": ["cat", "dog"]}, ["dog", "cat"]),
        ({"task": "detect", "labels": ["__background__", "cat", "dog"]}, ["dog", "cat"]),
        ({"task": "detect", "labels": "coco"}, ["bicycle", "person"]),
        ({"labels": {0: "cat", 1: "dog"}}, ["dog", "cat"]),
    ],
)
def test_its_labels_begin_with_1(tmp_path: Path, beside: dict[str, Any] | None, labels: list[str]) -> None:
    model = model_of(tmp_path, beside)
    assert (model.task, model.export.how.layout, model.file.size, model.input_shape) == (
        "detect", "torchvision", (48, 64), (48, 64, 3)
    )  # fmt: skip
    if beside is not None and beside["labels"] == "coco":
        assert (model.labels[13], model.labels[90], len(model.labels)) == ("stop sign", "toothbrush", 91)
    pixels = torch.zeros((2, 48, 64, 3), dtype=torch.uint8)
    pixels[1, 30, 40] = pixels[1, 10, 61] = 255
    none, two = (answered(model, pixels, model.placement(128, 96), row)["detections"] for row in (0, 1))
    assert none == []
    assert [each["label"] for each in two] == labels
    assert [[*each["box"].values()] for each in two] == [[122, 20, 124, 22], [80, 60, 82, 62]]


@pytest.mark.parametrize(
    ("beside", "sentence"),
    [
        ({"task": "segment"}, r"torchvision's detectors are for detect, with outputs \[k, 4\], \[k\], \[k\]"),
        ({"task": "detect", "size": 96}, "its input is 48 x 64, and 96 x 96 is stated"),
        ({"task": "detect", "colour": "blue"}, "colour"),
    ],
)
def test_what_does_not_fit_is_refused_in_a_sentence(tmp_path: Path, beside: dict[str, Any], sentence: str) -> None:
    with pytest.raises(WeightsError, match=sentence) as caught:
        model_of(tmp_path, beside)
    assert "\n" not in str(caught.value)


def test_it_stays_one_of_tensors_where_that_is_said(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    model = model_of(tmp_path, {"task": "tensors"})
    assert (model.task, [list(spec.shape) for spec in model.inputs]) == ("infer", [[3, 48, 64]])
