"""The first words on a file that cannot be served: what is wrong, at once and in one sentence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from torch import nn

from app.config import models as settings
from models.contract.errors import WeightsError, reason_of
from models.exports.exported import SUFFIXES as EXPORTED
from models.exports.library_files import stated_in
from models.exports.metadata import sidecar_of
from models.onnx.file import DamagedError, read_onnx
from models.weights.checkpoint import SUFFIXES as WEIGHTS


def test_what_pytorch_announces_is_said() -> None:
    with pytest.raises(RuntimeError) as error:
        nn.Linear(2, 2).load_state_dict({"weight": nn.Linear(2, 2).weight.data})
    said = reason_of(error.value)
    assert said.startswith("Error(s) in loading state_dict for Linear: ")
    assert 'Missing key(s) in state_dict: "bias"' in said
    assert reason_of(ValueError("")) == "ValueError"
    assert reason_of(ValueError("one:\n")) == "one"
    assert reason_of(ValueError("one.\ntwo")) == "one"


@pytest.mark.parametrize(
    ("preprocessor", "said"),
    [
        ({"size": 32, "image_mean": [0.5, 0.5], "image_std": [0.5, 0.5]}, "mean is [0.5"),
        ({"size": {"height": "a", "width": 2}, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}, 'size is ["a", 2]'),
    ],
)
def test_what_a_library_wrote_is_refused_in_a_sentence(
    tmp_path: Path, preprocessor: dict[str, object], said: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "vit"}))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(preprocessor))
    with pytest.raises(WeightsError) as error:
        sidecar_of(stated_in(tmp_path, {"model_type": "vit"}), "config.json beside a.onnx")
    assert str(error.value).startswith("config.json beside a.onnx: ")
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_a_file_that_ends_too_early_is_called_that(tmp_path: Path) -> None:
    whole = bytes((8, 8, 0x3A, 10, *b"0123456789", 0x42, 2, 0x10, 17))
    file = tmp_path / "a.onnx"
    for length in range(1, 14):
        file.write_bytes(whole[:length])
        with pytest.raises(DamagedError, match=r"(is|damaged,) cut short"):
            read_onnx(file)
    file.write_bytes(whole[:8])
    with pytest.raises(DamagedError, match=r"a\.onnx is cut short: it ends after 8 bytes"):
        read_onnx(file)
    file.write_bytes(b"<html>")
    with pytest.raises(DamagedError, match="not an ONNX file"):
        read_onnx(file)


def test_every_ending_of_a_file_is_looked_for() -> None:
    assert set(settings._FILES) == {*EXPORTED, *WEIGHTS}


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ("cars={}/yolo11m.onnx", "There is no file '{}/yolo11m.onnx' for cars; did you mean '{}/yolo11n.onnx'?"),
        ("{}/other.pt", "There is no file '{}/other.pt' for other."),
        ("{}/yolo11m.onnx?task=detect&size=640", "There is no file '{}/yolo11m.onnx' for yolo11m; did you mean"),
        ("a={}/b.pt2@sha256:" + 64 * "0", "There is no file '{}/b.pt2' for a."),
        ("dogs=resnet50:{}/dogs.pth", "There is no file '{}/dogs.pth' for dogs."),
        ("cars={}/yolo11n.onnx", ""),
        ("dogs={}", ""),
        ("resnet50", ""),
        ("dogs=resnet50:sample", ""),
    ],
)
def test_a_file_that_is_not_here_is_said_without_loading_anything(tmp_path: Path, entry: str, said: str) -> None:
    (tmp_path / "yolo11n.onnx").touch()
    found = settings.absent(entry.replace("{}", str(tmp_path)))
    assert found.startswith(said.replace("{}", str(tmp_path)))
    assert bool(found) == bool(said)
