"""The sample models: their images, the loss of the detector, and that the shipped weights are as good as recorded."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file

from benchmarks.sample_training import images
from benchmarks.sample_training.rounding import rounded
from benchmarks.sample_training.train import RECIPES
from models import publishers, sample
from models.sample.generator import KINDS, classification_image, detection_image
from models.tasks.accuracy import Boxes, average_precision

DIRECTORY = publishers.SAMPLES_IN_SOURCES


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Small tensors gain nothing from threads, and on a busy machine they wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# Images


def test_an_image_depends_on_seed_index_and_size_alone() -> None:
    wanted = [detection_image(3, index, (120, 90)) for index in range(4)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda index: detection_image(3, index, (120, 90)), reversed(range(4))))[::-1]
    for first, second in zip(wanted, found, strict=True):
        assert all(np.array_equal(first[part], second[part]) for part in range(3))
    assert np.array_equal(classification_image(3, 0, (64, 64))[0], classification_image(3, 0, (64, 64))[0])


def test_the_sample_images_are_those_of_the_generator(tmp_path: Path) -> None:
    images.main([str(tmp_path)])
    names = sorted(path.name for path in sample.IMAGES.iterdir())
    assert names == sorted(path.name for path in tmp_path.iterdir())
    assert json.loads((tmp_path / "expected.json").read_text()) == _expected()
    for path in sample.IMAGES.glob("*.jpg"):
        assert path.stat().st_size < 100_000
        stored, drawn = (np.array(Image.open(file), dtype=np.int16) for file in (path, tmp_path / path.name))
        assert np.abs(stored - drawn).mean() < 1  # JPEG codecs differ by a rounding


# Average precision


def _boxes(*rows: tuple[float, float, float, float, int, float]) -> Boxes:
    table = np.array(rows, dtype=np.float32).reshape(-1, 6)
    return Boxes(table[:, :4], table[:, 4].astype(np.int64), table[:, 5])


TRUE = _boxes((0, 0, 10, 10, 0, 1), (20, 20, 30, 30, 0, 1))


@pytest.mark.parametrize(
    ("found", "wanted"),
    [
        (_boxes((0, 0, 10, 10, 0, 0.9), (20, 20, 30, 29, 0, 0.8)), 1.0),
        (_boxes(), 0.0),
        (_boxes((0, 0, 10, 10, 1, 0.9)), 0.0),
        (_boxes((0, 0, 10, 4, 0, 0.9)), 0.0),
        (_boxes((0, 0, 10, 10, 0, 0.9)), 51 / 101),
        (_boxes((0, 0, 10, 10, 0, 0.9), (0, 0, 10, 10, 0, 0.8)), 51 / 101),
        (_boxes((50, 50, 60, 60, 0, 0.9), (0, 0, 10, 10, 0, 0.8)), 51 / 101 / 2),
    ],
    ids=["all right", "nothing found", "another class", "too far off", "half of them", "a double", "one false alarm"],
)
def test_average_precision(found: Boxes, wanted: float) -> None:
    assert average_precision([TRUE], [found], 0) == pytest.approx(wanted)


# The shipped weights


def _expected() -> Any:
    return json.loads((sample.IMAGES / "expected.json").read_text())


def test_the_files_are_small_half_precision_and_say_what_they_are() -> None:
    files = [DIRECTORY / f"{name}.safetensors" for name in ("resnet50", "yolov8n")]
    assert sum(file.stat().st_size for file in files) < 60_000_000
    for file in files:
        with safe_open(file, "pt") as tensors:
            metadata = tensors.metadata()
            assert {tensors.get_tensor(name).dtype for name in tensors.keys()} == {torch.float16, torch.int64}  # noqa: SIM118
        assert metadata["architecture"] == file.stem
        assert tuple(json.loads(metadata["labels"])) == KINDS


@pytest.mark.parametrize("name", ["resnet50", "yolov8n"])
def test_the_shipped_weights_are_rounded_as_training_rounds_them(name: str) -> None:
    state = load_file(DIRECTORY / f"{name}.safetensors")
    assert all(torch.equal(rounded(tensor, RECIPES[name].steps), tensor) for tensor in state.values())
