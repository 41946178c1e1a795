"""Archives of TorchServe: what is in them is converted, what is wrong with them is said in one sentence."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest
import torch

from models import publishers as weights
from models.contract.errors import WeightsError, WeightsNotFoundError
from models.vision import torchvision
from models.weights.checkpoint import read


def archive(folder: Path, files: dict[str, str | bytes | Path]) -> Path:
    path = folder / "model.mar"
    with zipfile.ZipFile(path, "w") as opened:
        for name, content in files.items():
            opened.writestr(name, content.read_bytes() if isinstance(content, Path) else content)
    return path


def manifest(name: str = "weights.pth") -> str:
    return json.dumps({"model": {"modelName": "dogs", "serializedFile": name, "handler": "image_classifier"}})


@pytest.mark.parametrize("labels", [{"0": "pug", "1": "husky"}, {"0": ["n1", "pug"], "1": ["n2", "husky"]}])
def test_an_archive_becomes_safetensors_with_its_labels(tmp_path: Path, labels: dict[str, object]) -> None:
    network = torchvision.models.resnet18(num_classes=2)
    torch.save(network.state_dict(), tmp_path / "weights.pth")
    files: dict[str, str | bytes | Path] = {
        "MAR-INF/MANIFEST.json": manifest(),
        "weights.pth": tmp_path / "weights.pth",
        "index_to_name.json": json.dumps(labels),
        "model.py": "raise SystemExit('this must never run')",
    }
    weights.convert(archive(tmp_path, files), tmp_path / "dogs.safetensors", torch.float32)
    converted = read(tmp_path / "dogs.safetensors")
    assert converted.labels == ("pug", "husky")
    assert converted.state.keys() == network.state_dict().keys()
    assert torch.equal(converted.state["fc.weight"], network.state_dict()["fc.weight"])


@pytest.mark.parametrize(
    "files",
    [
        {"something": "else"},
        {"MAR-INF/MANIFEST.json": "{"},
        {"MAR-INF/MANIFEST.json": "{}"},
        {"MAR-INF/MANIFEST.json": manifest("missing.pth")},
        {"MAR-INF/MANIFEST.json": manifest(), "weights.pth": b"", "index_to_name.json": '{"1": "gap"}'},
    ],
    ids=["no-manifest", "no-json", "no-model", "no-weights", "labels-with-gaps"],
)
def test_what_is_no_such_archive_is_one_sentence(tmp_path: Path, files: dict[str, str | bytes | Path]) -> None:
    with pytest.raises(WeightsError, match=r"model\.mar is no archive of TorchServe"):
        weights.convert(archive(tmp_path, files), tmp_path / "x.safetensors")
    with pytest.raises(WeightsNotFoundError):
        weights.convert(tmp_path / "none.mar", tmp_path / "x.safetensors")
    assert not (tmp_path / "x.safetensors").exists()


def test_a_file_name_cannot_lead_out_of_the_folder(tmp_path: Path) -> None:
    torch.save({"fc.weight": torch.zeros(2, 3)}, tmp_path / "weights.pth")
    outside = "../../outside.pth"
    files: dict[str, str | bytes | Path] = {
        "MAR-INF/MANIFEST.json": manifest(outside),
        outside: tmp_path / "weights.pth",
    }
    weights.convert(archive(tmp_path, files), tmp_path / "x.safetensors", torch.float32)
    assert (tmp_path / "x.safetensors").exists()
    assert not (tmp_path.parent.parent / "outside.pth").exists()
