"""The check for machines with an accelerator: what it makes of results, and that it refuses politely without one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import gpu_check
from models import PixelModel, open_model, parse_spec

ROOT = Path(__file__).parents[2]
ROW = {
    "model": "m",
    "engine": "graph",
    "precision": "fp16",
    "became": ["graph", "fp16"],
    "load_s": 1.0,
    "largest_relative_error": 0.01,
    "p50_ms": 2.0,
    "images_per_s": {"1": 10.0, "8": 70.0},
}
REPORT: dict[str, Any] = {
    "device": "cuda:0",
    "name": "Chip",
    "torch": "2",
    "date": "d",
    "tests": [{"what": "t", "passed": True, "says": "9 passed"}],
    "engines": [ROW, {"model": "m", "engine": "tensorrt", "precision": "fp16", "refusal": "it is not installed"}],
    "http": [{"model": "m", "engine": "graph", "precision": "fp16", "service": {"1": {"errors": 0}}}],
}


def with_row(**changes: Any) -> dict[str, Any]:
    return {**REPORT, "engines": [{**ROW, **changes}]}


def test_a_refusal_is_no_failure_and_all_else_is() -> None:
    assert not gpu_check.failed(REPORT)
    assert gpu_check.failed(with_row(largest_relative_error=0.06))
    assert gpu_check.failed(with_row(largest_relative_error=float("nan")))
    assert gpu_check.failed(with_row(became=["eager", "fp32"]))  # 0.01 is too much for float32.
    assert gpu_check.failed({**REPORT, "tests": [{**REPORT["tests"][0], "passed": False}]})
    assert gpu_check.failed({**REPORT, "engines": [{"failure": "ended with 124"}]})
    assert gpu_check.failed({**REPORT, "http": [{"service": {"1": {"errors": 2}}}]})


def test_answers_are_compared_relative_to_the_largest_number() -> None:
    theirs = [np.array([[1.0, -4.0]], np.float32), np.array([1, 2, 3, 4])]
    ours = (np.array([[1.2, -4.0]], np.float32), np.array([1, 2, 3, 5]))
    error, equal = gpu_check.compare(ours, theirs)
    assert error == pytest.approx(0.05)
    assert equal == 0.75
    assert gpu_check.compare((np.array([[np.nan, 0]], np.float32),), theirs[:1])[0] == np.inf


def test_the_table_has_a_row_for_each_engine() -> None:
    text = gpu_check.markdown(REPORT)
    assert "| m | graph | fp16 | 1.0 | 1.0e-02 | 2.0 | 10.0 | 70.0 |" in text
    assert "| m | tensorrt | fp16 | refused: it is not installed |" in text
    assert "WRONG" in gpu_check.markdown(with_row(largest_relative_error=0.5))


def test_pixels_are_the_sample_images() -> None:
    model = open_model(parse_spec("yolov8n", "sample"), Path())
    assert isinstance(model, PixelModel)
    pixels = gpu_check.sample_pixels(model, 7)
    assert pixels.shape == (7, *model.input_shape)
    assert np.array_equal(pixels[0], pixels[6])  # There are six.
    assert not np.array_equal(pixels[0], pixels[1])


def test_without_the_device_it_says_so_and_ends_with_2(tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = [sys.executable, "-m", "benchmarks.gpu_check", "--device", "mlu", "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("gpu_check: there is nothing to check: ")
    assert not out.exists()


def test_it_measures_an_engine_on_the_cpu(tmp_path: Path) -> None:
    options = ("--device", "cpu", "--models", "yolov8n", "--engines", "eager,warp", "--precisions", "fp32")
    less = ("--sizes", "1", "--seconds", "0.1", "--no-tests", "--no-http", "--out", str(tmp_path))
    command = [sys.executable, "-m", "benchmarks.gpu_check", *options, *less]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    eager, warp = json.loads((tmp_path / "gpu_check.json").read_text())["engines"]
    assert eager["became"] == ["eager", "fp32"]
    assert eager["largest_relative_error"] <= 1e-4
    assert eager["images_per_s"]["1"] > 0
    assert "no engine 'warp'" in warp["refusal"]
