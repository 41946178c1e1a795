"""Graphs on a simulated device with pinned memory: answers are copied inside them, items come from where they lie."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SCRIPT = """
from pathlib import Path

import numpy as np
import torch

from backends import BACKENDS, simulated

simulated.configure("npu:1,graphs=1", "", Path.home() / ".cache" / "anychip")
from tests.unit.test_device_engines import Network, images, on_cpu

backend = next(each for each in BACKENDS if each.name == "npu")
assert [device.id for device in backend.devices()] == ["npu:0"]
executable, report = backend.load(Network(), "npu:0", "graph", "fp32", (1, 2, 4))
assert report.engine == "graph", report
captured = executable._captured.values()
assert len(captured) == 6 and all(each.hosts for each in captured), "two a size, which copy their answers themselves"


def same(started, pixels):
    for ours, theirs in zip(started.outputs(), on_cpu(pixels), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


for size in (1, 2, 4):
    same(executable.start(images(size, size)), images(size, size))
first, second = images(4, 7), images(3, 8)
for _ in range(20):
    apart = [second[0].copy(), torch.from_numpy(second[1].copy()).to("npu:0"), second[2].copy()]
    begun = executable.start_rows([each.copy() for each in first], 4), executable.start_rows(apart, 4)
    same(begun[0], first)
    same(begun[1], np.concatenate((second, np.zeros_like(second[:1]))))
executable.close()
print("all alike")
"""


def test_two_batches_under_way_of_items_that_lie_apart() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=ROOT, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "all alike" in done.stdout
