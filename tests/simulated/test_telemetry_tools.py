"""Telemetry over vendors' tools that misbehave, as real processes."""

from __future__ import annotations

import json
import logging
import os
import re
import stat
import threading
from collections.abc import Callable
from math import isnan, nan
from pathlib import Path

import pytest

from anychip_ascend import smi
from backends import BACKENDS
from backends.telemetry import (
    Tool,
    ToolError,
    sampler,
)
from tests.support.telemetry import CNMON, GPUSTACK, MAP, OUTPUTS, approx, read, values
from tests.support.work import until

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


def test_cnmon_leaves_nothing_in_the_working_directory(
    fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    fake("cnmon", f"echo '{json.dumps(CNMON)}' > cnmon_info.json; pwd > {tmp_path}/where")
    assert values(read("cambricon", Tool())[1]) == approx(0.4, nan, 51)
    assert not list(here.iterdir())
    assert not Path((tmp_path / "where").read_text().strip()).exists()


def test_gpustack_runtime_is_asked_in_a_process_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "gpustack_runtime"
    package.mkdir()
    package.joinpath("__init__.py").touch()
    package.joinpath("detector.py").write_text(
        "import enum, types\n"
        "class ManufacturerEnum(str, enum.Enum):\n    MTHREADS = 'mthreads'\n"
        "def detect_devices(fast=True, manufacturer=None, usage=True):\n"
        f"    found = {GPUSTACK!r}\n"
        "    return [types.SimpleNamespace(index=3, to_dict=lambda: each) for each in found[:1] if manufacturer]\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert {card: values(each) for card, each in read("moorethreads", Tool()).items()} == {3: approx(0.07, 33.5, 45)}


@pytest.mark.parametrize(
    "vendor", [each.facts.telemetry for each in BACKENDS if each.facts.telemetry not in ("", "nvidia")]
)
def test_a_missing_tool_leaves_everything_unknown(
    vendor: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    telemetry = sampler(vendor)
    with caplog.at_level(logging.WARNING):
        telemetry.sample()
        telemetry.sample()
    telemetry.close()
    assert len([record for record in caplog.records if re.search("cannot be (run|read)", record.message)]) == 1
    assert isnan(telemetry.latest(0).power_watts)


def test_a_tool_that_fails_says_its_code(fake: Fake) -> None:
    fake("brsmi", "echo '0, 1, 2, 3'; exit 3")
    with pytest.raises(ToolError, match="brsmi ended with code 3"):
        read("biren", Tool())


def test_a_tool_that_prints_bytes_that_are_no_text(fake: Fake) -> None:
    fake("brsmi", "printf '\\377\\376\\n0, 1, 2, 3\\n'")
    assert values(read("biren", Tool())[0]) == approx(0.01, 2, 3)


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
    telemetry = sampler("hygon", limit_s=600)
    telemetry.latest(0)
    pid = int(started.read_text())  # Blocks until the tool runs.
    telemetry.close()
    until(lambda: not alive(pid))
    assert not [thread for thread in threading.enumerate() if thread.name == "telemetry"]


def test_a_closed_tool_runs_nothing(fake: Fake) -> None:
    fake("brsmi", "echo '0, 1, 2, 3'")
    tool = Tool()
    tool.close()
    with pytest.raises(ToolError, match="not run any more"):
        tool.run("brsmi")


def test_ascend_asks_for_the_workers_own_card_alone_and_for_the_map_once(fake: Fake, tmp_path: Path) -> None:
    """Each worker has a reader; all of them over all cards would be dozens of runs in a few seconds."""
    common, log = OUTPUTS / "npu-smi-common.txt", tmp_path / "runs"
    fake("npu-smi", f"echo \"$@\" >> {log}; if [ \"$2\" = -m ]; then cat <<'X'\n{MAP}X\nelse cat '{common}'; fi")
    tool = Tool()
    for _ in range(2):
        assert set(smi.read(tool, wanted=(1,))) == {1}
    runs = log.read_text().splitlines()
    assert [run.startswith("info -m") for run in runs] == [True, False, False, False, False, False]
    assert {run.partition(" -i ")[2].split()[0] for run in runs[1:]} == {"3"}
    assert len(set(runs[1:])) == 4  # Health, memory and ECC are asked for once a minute.
