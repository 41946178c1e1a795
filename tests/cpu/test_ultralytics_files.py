"""Checkpoints that ultralytics itself has written are read without it."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


WRITE = """
import sys, torch
from copy import deepcopy
from ultralytics import YOLO
torch.manual_seed(0)
yolo = YOLO("yolov8n.yaml", verbose=False)
yolo.model.names = {number: f"thing {number}" for number in range(80)}
half = deepcopy(yolo.model).half()
entries = {"epoch": -1, "best_fitness": None, "updates": None, "optimizer": None, "date": "2026-01-01"}
torch.save({**entries, "model": half, "ema": None}, "model.pt")
torch.save({**entries, "model": None, "ema": half}, "ema.pt")
yolo.save("saved.pt")
torch.save({name: tensor.half() if tensor.is_floating_point() else tensor
            for name, tensor in yolo.model.state_dict().items()}, "expected.pth")
"""


READ = """
import importlib.abc, sys
class Blocker(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "ultralytics":
            raise ImportError("ultralytics must not be needed")
sys.meta_path.insert(0, Blocker())
from pathlib import Path
import torch
from models.checkpoint import read, read_header
expected = torch.load("expected.pth", weights_only=True)
for name in ("model.pt", "ema.pt", "saved.pt"):
    found = read(Path(name))
    assert found.state.keys() == expected.keys(), (name, found.state.keys() ^ expected.keys())
    assert all(torch.equal(found.state[key], expected[key]) for key in expected), name
    assert all(found.state[key].dtype == expected[key].dtype for key in expected), name
    assert found.labels == tuple(f"thing {number}" for number in range(80)), name
    header = read_header(Path(name))
    assert header.labels == found.labels, name
    assert {key: x.shape for key, x in header.state.items()} == {key: x.shape for key, x in found.state.items()}
assert not any(module.partition(".")[0] == "ultralytics" for module in sys.modules)
"""


@pytest.mark.skipif(importlib.util.find_spec("ultralytics") is None, reason="ultralytics is not installed")
def test_files_written_by_ultralytics_are_read_without_it(tmp_path: Path) -> None:
    settings = {"YOLO_CONFIG_DIR": str(tmp_path), "YOLO_OFFLINE": "1", "YOLO_VERBOSE": "0", "PYTHONPATH": str(ROOT)}
    for script in (WRITE, READ):
        done = subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, **settings},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert done.returncode == 0, done.stderr
