"""What is kept of a model's loads, whatever the worker does meanwhile."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from app.config import Settings
from app.fleet import footprints
from backends import Choice, open_backend
from backends.contract.backend import Device
from models.contract.tensors import TensorSpec
from models.exports.exported import ExportedModel
from tests.support.doubles import loaded_as


def test_a_load_is_kept_though_the_model_was_unloaded_since(tmp_path: Path) -> None:
    file = tmp_path / "a.onnx"
    file.write_bytes(b"weights")
    x = TensorSpec("x", "FP32", (4,))
    model = ExportedModel("a", "onnx", (), "a.onnx", str(file), (16,), (x,), (x,), True, (1, 8), None)
    device = Device("cpu:0", "cpu", 0, "fp32")
    choice = Choice(open_backend(device), ("cpu:0",), found=(device,))
    given: dict[str, Any] = {"cache_dir": tmp_path}
    settings = Settings(**given)
    worker: Any = SimpleNamespace(
        device="cpu:0",
        plan=SimpleNamespace(models=[model]),
        ready=SimpleNamespace(loaded=[None]),  # It has come and gone before the files are written.
    )
    for load_s in (3.0, 0.5, 30.0, 1.0, 40.0):  # It stood still twice.
        loaded = loaded_as("eager", {1: 0.1}, memory_bytes=1000, load_s=load_s)
        footprints.keep(worker, {0: loaded}, settings, choice)
    [kept] = footprints.every(tmp_path)
    assert (kept.first_load_s, kept.load_s, kept.memory_bytes) == (3.0, 3.0, 1000)
