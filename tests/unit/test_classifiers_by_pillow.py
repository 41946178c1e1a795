"""Classifiers of Ultralytics see what torchvision's transforms make of a PIL image, every byte of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from PIL import Image
from torchvision.transforms import functional as transforms

from models import open_model, parse_spec
from models.contract.resize import Centre, Resize
from models.exports.answers import Export, TriedImages
from models.exports.exported import _image_model
from models.exports.images import ExportedImages
from models.exports.layouts import Interpretation
from models.exports.metadata import Sidecar
from models.yolo.model import YOLO


def noise(width: int, height: int) -> np.ndarray:
    return np.random.default_rng(width * 10_007 + height).integers(0, 256, (height, width, 3), dtype=np.uint8)


def reference(image: np.ndarray, side: int) -> np.ndarray:
    resized = transforms.resize(Image.fromarray(image), [side])
    return np.array(transforms.center_crop(resized, [side, side]))


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 1200), st.integers(1, 1200), st.integers(32, 320))
def test_every_byte_is_that_of_ultralytics_transforms(width: int, height: int, side: int) -> None:
    assume(max(width, height) <= 64 * min(width, height))  # Other strips are cut before they are resized.
    image, resize = noise(width, height), Centre((side, side), side, by="pillow")
    out = torch.zeros((side, side, 3), dtype=torch.uint8)
    resize.preprocess(torch.from_numpy(image), out, width, height)
    assert np.array_equal(out.numpy(), reference(image, side))


def test_classifiers_of_ultralytics_see_what_its_transforms_make() -> None:
    model = open_model(parse_spec("yolov8n-cls:random"), Path())
    assert isinstance(model, YOLO)
    assert model.file.resize == Centre((224, 224), 224, by="pillow")
    assert model.decode_size(8000, 6000) == (8000, 6000)


def of_export(size: tuple[int, int], stated: Sidecar | None = None, exporter: str = "ultralytics 8.4.1") -> Resize:
    how, shades = Interpretation("classes", "classes", 3, probabilities=True), ((0.0,) * 3, (1.0,) * 3)
    tried = TriedImages(
        "classify", Export(how, (1, 1)), size, "centre", *shades, None, exporter, ("a", "b", "c"), ((1, 3),)
    )
    model = _image_model("m", Path("m.onnx"), tried, stated)
    assert isinstance(model, ExportedImages)
    return model.file.resize


@pytest.mark.parametrize("shape", [(96, 128), (128, 96)], ids=["wide", "tall"])
@pytest.mark.parametrize("size", [(333, 421), (640, 480), (96, 128), (421, 97)])
def test_to_an_input_that_is_no_square_ultralytics_stretches(shape: tuple[int, int], size: tuple[int, int]) -> None:
    checkpoint = YOLO.of("m", "yolov8n-cls", ("a", "b", "c"), "random", None, size=shape).file.resize
    image, expected = noise(*size), transforms.resize(Image.fromarray(noise(*size)), list(shape))
    for resize in (checkpoint, of_export(shape)):
        out = torch.zeros((*shape, 3), dtype=torch.uint8)
        resize.preprocess(torch.from_numpy(image), out, *size)
        assert np.array_equal(out.numpy(), np.array(expected))


def test_other_inputs_and_statements_are_left_as_they_are() -> None:
    assert of_export((96, 128), exporter="") == Centre((96, 128), 0, shape=(96, 128), keep="cover")
    assert of_export((96, 96)) == Centre((96, 96), 96, by="pillow")
    stated = Sidecar(task="classify", resize="centre")
    assert of_export((96, 128), stated) == Centre((96, 128), 0, by="pillow", shape=(96, 128), keep="cover")
