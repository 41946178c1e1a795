"""How an exported network's input takes images: channels, their place, levels."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from models.contract.grey import grey
from models.contract.resize import Whole
from models.contract.task_adapter import AdaptedFile
from models.exports.answers import Export
from models.exports.entry import Entry, entry_of
from models.exports.images import ExportedImages
from models.exports.layouts import Interpretation


@pytest.mark.parametrize(
    ("shape", "found"),
    [
        ((1, 3, 224, 192), (Entry(), 224, 192)),
        (("n", 3, None, None), (Entry(), None, None)),
        ((1, 1, 28, 28), (Entry(1), 28, 28)),
        ((1, 224, 192, 3), (Entry(last=True), 224, 192)),
        (("n", None, None, 3), (Entry(last=True), None, None)),
        ((1, 6, 32, 32), None),
    ],
)
def test_the_form_of_an_input_is_read_from_its_shape(shape: Any, found: Any) -> None:
    assert entry_of(shape, False) == found
    levels = entry_of(shape, True)
    assert (levels is None) == (found is None)
    assert levels is None or levels[0].levels


def test_grey_is_pillows_to_the_level() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (300, 400, 3), dtype=np.uint8)
    found = grey(torch.from_numpy(pixels)[None])
    assert found.shape == (1, 300, 400, 3)
    right = np.array(Image.fromarray(pixels).convert("L"))
    for channel in range(3):
        assert (found[0, :, :, channel].numpy() == right).all()


def test_a_picture_for_one_channel_is_grey_before_it_is_resized(tmp_path: Path) -> None:
    pixels = np.random.default_rng(1).integers(0, 256, (600, 400, 3), dtype=np.uint8)
    known = AdaptedFile(Whole((64, 64)), ("a", "b"))
    about = ("x", "onnx", known.labels, "x.onnx", str(tmp_path / "x.onnx"), (64, 64, 3), "detect", known)
    of_colours = ExportedImages(*about, export=Export(Interpretation("boxes", "yolov8", 2, 0), (1, 8)))
    of_grey = replace(of_colours, file=replace(known, grey=True))
    seen, right = (torch.zeros(64, 64, 3, dtype=torch.uint8) for _ in range(2))
    of_grey.preprocess(torch.from_numpy(pixels), seen, 400, 600)
    grey_picture = np.array(Image.fromarray(pixels).convert("L").convert("RGB"))
    of_colours.preprocess(torch.from_numpy(grey_picture), right, 400, 600)
    assert torch.equal(seen, right)
    assert torch.equal(grey(seen[None])[0], seen.float())
