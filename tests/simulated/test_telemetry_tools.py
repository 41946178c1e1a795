"""Telemetry over vendors' tools that misbehave, as real processes."""

from __future__ import annotations

import logging
import os
import re
import stat
import threading
from collections.abc import Callable
from math import isnan
from pathlib import Path

import pytest

from backends import BACKENDS
from backends.telemetry import Sampler, Tool, ToolError
from backends.telemetry.tools import reader
from tests.support.telemetry import read
from tests.support.work import until

GPUSTACK_DETECTOR = """
import enum
ManufacturerEnum = enum.Enum("ManufacturerEnum", {"MTHREADS": "mthreads"})
detect_devices = lambda manufacturer: [type("Device", (), {"index": 0, "to_dict": lambda _: {"power_used": 33.5}})()]
"""
"""Names that gpustack_runtime/detector of 0.2.6 has; a figure as its `Device.to_dict` gives it."""

Fake = Callable[[str, str], Path]


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    """Return a function that writes an executable shell script, which is first on PATH."""
    binaries = tmp_path / "bin"
    binaries.mkdir()
    monkeypatch.setenv("PATH", f"{binaries}{os.pathsep}{os.environ['PATH']}")

    def write(name: str, script: str) -> Path:
        path = binaries / name
        path.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return path

    return write


@pytest.mark.parametrize(
    "vendor", [each.facts.telemetry for each in BACKENDS if each.facts.telemetry not in ("", "nvidia")]
)
def test_a_missing_tool_leaves_everything_unknown(
    vendor: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    telemetry = Sampler(reader(vendor), Tool())
    with caplog.at_level(logging.WARNING):
        telemetry.sample()
        telemetry.sample()
    telemetry.close()
    assert len([record for record in caplog.records if re.search("cannot be (run|read)", record.message)]) == 1
    assert isnan(telemetry.latest(0).power_watts)


def test_a_package_is_asked_without_what_lies_around(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package, project = tmp_path / "gpustack_runtime", tmp_path / "project"
    package.mkdir()
    project.mkdir()
    (package / "detector.py").write_text(GPUSTACK_DETECTOR, encoding="utf-8")
    (project / "json.py").write_text("raise SystemExit(1)", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(project))
    assert read("moorethreads", Tool())[0].power_watts == 33.5


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc to see processes")
def test_a_tool_that_hangs_is_killed_with_its_children(fake: Fake, tmp_path: Path) -> None:
    fake("hy-smi", f"sleep 600 & echo $! > {tmp_path}/child; wait")
    with pytest.raises(ToolError, match=r"hy-smi did not end within 0\.5 s"):
        read("hygon", Tool(limit_s=0.5))
    child = int((tmp_path / "child").read_text())
    until(lambda: not alive(child))


def test_closing_ends_a_tool_that_hangs(fake: Fake, tmp_path: Path) -> None:
    started = tmp_path / "started"
    os.mkfifo(started)
    fake("hy-smi", f"echo $$ > {started}; exec sleep 600")
    telemetry = Sampler(reader("hygon"), Tool(limit_s=600))
    telemetry.latest(0)
    pid = int(started.read_text())  # Blocks until the tool runs.
    telemetry.close()
    until(lambda: not alive(pid))
    assert not [thread for thread in threading.enumerate() if thread.name == "telemetry"]
