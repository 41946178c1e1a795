"""`anychip verify` on simulated devices: a sound one passes, and each kind of broken one does not."""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from anychip_tools.verify import command
from anychip_tools.verify.engines import left_bytes
from anychip_tools.verify.report import Finding, Part, VerifyReport
from tests.support import warm

ROOT = Path(__file__).parents[2]
QUICK = ("--engines", "eager", "--precisions", "fp32", "--sizes", "1", "--seconds", "0.1", "--models", "resnet50")


def verify(out: Path, *words: str) -> tuple[int, dict[str, Any], str]:
    """Exit status, the report and what was printed."""
    done = warm.completed(ROOT, "-m", "app", "verify", *QUICK, "--out", str(out), *words)
    path = out / "anychip-report.json"
    return done.returncode, json.loads(path.read_text()) if path.exists() else {}, done.stdout + done.stderr


def failures(report: dict[str, Any]) -> dict[str, str]:
    return {
        finding["name"]: finding["detail"]
        for part in report["parts"]
        for finding in part["findings"]
        if finding["status"] == "FAIL"
    }


def test_a_sound_device_passes(tmp_path: Path) -> None:
    parts = ["doctor", "contract", "engines"]
    code, report, printed = verify(tmp_path, "--device", "npu", "--simulate", "npu:1", "--parts", ",".join(parts))
    assert (code, failures(report)) == (0, {}), printed
    found = {finding["name"]: finding for part in report["parts"] for finding in part["findings"]}
    assert [part["name"] for part in report["parts"]] == parts
    assert found["resnet50 eager fp32"]["figures"]["images_per_s_1"] > 0
    assert found["resnet50 eager fp32"]["figures"]["error_top1"] == 0
    assert report["about"]["measurement"] == "0.1 s"
    assert str(ROOT) not in (tmp_path / "anychip-report.json").read_text()


EVERYTHING = pytest.param(("npu", "--simulate", "npu:1"), id="npu, all parts", marks=pytest.mark.nightly)


@pytest.mark.parametrize("device", [pytest.param(("null", "--parts", "service"), id="null"), EVERYTHING])
def test_a_sound_service_passes_and_loses_nobody(tmp_path: Path, device: tuple[str, ...]) -> None:
    """Where a device computes, clients and workers that start take each other's processors: a minute of both cores."""
    code, report, printed = verify(tmp_path, "--device", *device)
    assert (code, failures(report)) == (0, {}), printed
    found = {finding["name"]: finding for part in report["parts"] for finding in part["findings"]}
    assert set(found["a worker is killed"]["detail"].split(" times ")[1:]) == {"200"}
    assert "| a hand-over | PASS |" in (tmp_path / "anychip-report.md").read_text()


@pytest.mark.parametrize(
    ("fault", "says"), [("leak_mb=4", "which a release does not give back"), ("lose=12", "npu:0 is lost")]
)
def test_a_broken_device_fails(tmp_path: Path, fault: str, says: str) -> None:
    words = ("--device", "npu", "--simulate", f"npu:1,{fault}", "--parts", "engines")
    code, report, printed = verify(tmp_path, *words)
    assert code == 1
    assert says in failures(report)["resnet50 eager fp32"]
    assert "npu:0 FAILED: resnet50 eager fp32" in printed


def test_without_the_device_there_is_nothing_to_verify(tmp_path: Path) -> None:
    code, report, printed = verify(tmp_path / "out", "--device", "mlu")
    assert (code, report) == (2, {})
    assert printed.startswith("anychip: there is nothing to verify: ")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("ending", [KeyboardInterrupt, SystemExit])
def test_whoever_ends_it_leaves_no_process_behind(
    ending: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    endless = tmp_path / "python"
    endless.write_text("#!/bin/sh\nexec sleep 1000\n")
    endless.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(endless))
    communicate = subprocess.Popen.communicate
    ended: list[subprocess.Popen[str]] = []

    def interrupted(self: subprocess.Popen[str], *words: Any, **named: Any) -> Any:
        if not ended:
            ended.append(self)
            raise ending
        return communicate(self, *words, **named)

    monkeypatch.setattr(subprocess.Popen, "communicate", interrupted)
    with pytest.raises(ending):
        command._run(["verify"], time.monotonic() + 1000)
    assert ended[0].poll() == -signal.SIGKILL


def test_whoever_had_little_of_the_budget_left_has_not_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    monkeypatch.setattr(command, "_run", lambda words, end_s: (command._TOOK_TOO_LONG, "", ""))
    [found] = command._in_child(parser.parse_args([]), "cpu:0", time.monotonic() + 30, what="contract")
    assert (found.name, found.status) == ("contract", "SKIP")


def test_a_report_tells_nothing_of_the_machine() -> None:
    told = "GPU-12345678-1234-1234-1234-123456789abc in /home/ann/models/a.onnx, Serial Number: 0324518000123"
    kernel = "6.18.44-anns-9: Landlock 7, seccomp; torch 2.9.0-rc1"
    report = VerifyReport(
        "cuda:0",
        "Chip",
        "2026-01-01",
        {"torch": "2"},
        [Part("doctor", [Finding("x", "PASS", told), Finding("y", "PASS", kernel)])],
    )
    for text in (report.json(), report.markdown()):
        assert not any(secret in text for secret in ("12345678-", "ann", "models", "0324518000123"))
        assert "6.18.44: Landlock 7, seccomp; torch 2.9.0-rc1" in text
        assert "UUID in …/a.onnx, Serial Number: …" in text


def test_without_what_auto_serves_nothing_has_passed_and_the_page_says_first_what_was_not_seen() -> None:
    eager = Finding("resnet50 eager fp32", "PASS")
    late = Finding("resnet50 auto", "SKIP", "the 5 s that were left did not suffice for it (--budget-s)")
    for found, passed in ((late, False), (Finding("resnet50 auto", "PASS"), True)):
        report = VerifyReport("cuda:0", "Chip", "d", {}, [Part("engines", [eager, found])])
        assert report.passed == passed
        head, _, _ = report.markdown().partition("## Engines")
        assert ("**Not seen:** resnet50 auto (the 5 s that were left" in head) == (not passed)
        assert report.markdown().startswith(f"# Chip (cuda): {'passed' if passed else 'not passed'}\n")


def test_a_part_without_any_success_has_not_passed() -> None:
    skipped = Part("engines", [Finding("x", "SKIP")])
    sound = Part("doctor", [Finding("y", "PASS")])
    assert not VerifyReport("cpu:0", "CPU", "d", {}, [sound, skipped]).passed
    assert VerifyReport("cpu:0", "CPU", "d", {}, [sound]).passed
    assert not VerifyReport("cpu:0", "CPU", "d", {}, []).passed


@pytest.mark.parametrize(
    ("start", "levels", "left"),
    [
        (10, [10, 10, 10, 10], 0),
        (10, [20, 20, 20, 20], 0),
        (10, [12, 14, 16, 18], 8),
        (10, [18, 16, 12, 10], 0),
        (1, [5], 4),
    ],
)
def test_what_first_batches_take_for_good_is_no_leak(start: int, levels: list[int], left: int) -> None:
    assert left_bytes([start, *levels]) == left
