"""Embeddings, semantic segmentation, depth and regression by the command predict."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from app.cli import main
from models.sample import IMAGES
from tests.support.task_files import OF_IMAGES, written

IMAGE = IMAGES / "detect_1.jpg"
SAID = {"embed": "embedding", "segment_semantic": "0.500  thing", "depth": "characters", "regress": "31.5"}


def test_predict_prints_and_draws_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drawn = {}
    for task in OF_IMAGES:
        command = ["predict", str(written(tmp_path, task)), str(IMAGE), "--save", str(tmp_path / task)]
        assert main([*command, "--device", "cpu", "--engine", "eager", "--precision", "fp32"]) == 0
        said = capsys.readouterr().out
        assert SAID[task] in said
        assert len(said) < 1_000, "nobody reads base64"
        drawn[task] = np.asarray(Image.open(tmp_path / task / "detect_1.png")).astype(int)
    with Image.open(IMAGE) as image:
        original = np.asarray(image.convert("RGB")).astype(int)
    np.testing.assert_array_equal(drawn["embed"], original)
    assert (np.abs(drawn["regress"] - original).max(axis=2) > 100)[:40, :120].mean() > 0.1, "its numbers"
    assert not (drawn["regress"] != original)[200:].any()
    # Two colours over the two halves, and from dark to bright.
    over = {task: (drawn[task] - 0.4 * original).mean(axis=0) for task in ("segment_semantic", "depth")}
    assert np.abs(over["segment_semantic"][:300] - over["segment_semantic"][0]).max() < 2
    assert np.abs(over["segment_semantic"][340] - over["segment_semantic"][0]).max() > 20
    assert over["depth"][600].mean() - over["depth"][40].mean() > 100


def test_tables_have_areas_and_values(tmp_path: Path) -> None:
    for task, rows in {
        "segment_semantic": ["nothing,0,0.5,", "thing,1,0.5,"],
        "regress": ["nothing,,31.5", "thing,,1.75"],
        "embed": [",,,,"],
    }.items():
        table = tmp_path / f"{task}.csv"
        command = ["predict", str(written(tmp_path, task)), str(IMAGE), "--output", str(table)]
        assert main([*command, "--device", "cpu", "--engine", "eager", "--precision", "fp32"]) == 0
        lines = table.read_text().splitlines()[1:]
        assert len(lines) == len(rows)
        assert all(f",640,480,{row}" in line for line, row in zip(lines, rows, strict=True))
