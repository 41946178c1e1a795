"""What was found of a file is found again at the next start, as long as all that it depends on is the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from models.contract.errors import WeightsError
from models.exports import exported as kept_module
from models.exports.answers import Tried, TriedTensors
from models.exports.exported import kept
from models.weights.opened import copied, looked_at

FOUND = Tried(tensors=TriedTensors((), (), True, (1, 4)), hint="a hint")
ASKED: dict[str, Any] = {"images": None, "own": ["/somewhere/a.onnx"]}


def times_tried(files: Any, *asked: tuple[dict[str, Any], str]) -> int:
    """How often a file is really tried, of several times that it is asked for."""
    count = 0

    def find() -> Tried:
        nonlocal count
        count += 1
        return FOUND

    for given, architecture in asked:
        assert kept(files, given, architecture, find) == FOUND
    return count


def opened(folder: Path, content: bytes = b"a graph") -> Any:
    folder.mkdir(exist_ok=True)
    (folder / "a.onnx").write_bytes(content)
    return copied(looked_at(folder / "a.onnx"), folder.parent / "cache")


def test_a_file_is_tried_once(tmp_path: Path) -> None:
    files = opened(tmp_path / "models")
    assert times_tried(files, (ASKED, ""), (ASKED, ""), ({**ASKED, "own": ["/elsewhere/a.onnx"]}, "")) == 1
    assert times_tried(opened(tmp_path / "models"), (ASKED, "")) == 0


def test_what_is_stated_beside_it_or_another_file_is_another_trial(tmp_path: Path) -> None:
    files = opened(tmp_path / "models")
    stated = {**ASKED, "images": {"sidecar": {"task": "embed"}}}
    assert times_tried(files, (ASKED, ""), (stated, ""), (ASKED, "timm/resnet50"), (stated, "")) == 3
    assert times_tried(opened(tmp_path / "models", b"another graph"), (ASKED, "")) == 1


def test_another_release_of_what_reads_it_tries_it_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = opened(tmp_path / "models")
    assert times_tried(files, (ASKED, "")) == 1
    found = kept_module._versions()
    assert any(each.startswith("torch ") for each in found)
    monkeypatch.setattr(kept_module, "_versions", lambda: [*found[1:], "another reader"])
    assert times_tried(files, (ASKED, "")) == 1


def test_a_refusal_is_not_kept_nor_anything_where_there_is_no_copy(tmp_path: Path) -> None:
    files = opened(tmp_path / "models")

    def refuses() -> Tried:
        raise WeightsError("a.onnx is none.")

    with pytest.raises(WeightsError):
        kept(files, ASKED, "", refuses)
    assert times_tried(files, (ASKED, "")) == 1
    assert times_tried(replace(files, is_copy=False), (ASKED, ""), (ASKED, "")) == 2
