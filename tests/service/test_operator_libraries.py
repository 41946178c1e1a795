"""A library of operators that is not there ends a command with one sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.warm import completed

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("command", ["predict", "serve"])
def test_a_library_that_is_not_there_ends_the_start(command, tmp_path):
    missing = str(tmp_path / "missing.so")
    image = str(ROOT / "models" / "sample" / "images" / "detect_1.jpg")
    rest = ["yolov8n:sample", image] if command == "predict" else ["--models", "yolov8n:sample", "--port", "0"]
    ended = completed(tmp_path, "-m", "app", command, *rest, "--device", "cpu", "--plugins", missing)
    assert ended.returncode == 1
    assert "missing.so is not there." in ended.stderr
