"""`anychip verify` on simulated devices: a sound one passes, and each kind of broken one does not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

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
    found = (finding for part in report["parts"] for finding in part["findings"])
    return {finding["name"]: finding["detail"] for finding in found if finding["status"] == "FAIL"}


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
    ("fault", "says"),
    [
        pytest.param("leak_mb=4", "which a release does not give back", marks=pytest.mark.nightly),
        ("lose=12", "npu:0 is lost"),
    ],
)
def test_a_broken_device_fails(tmp_path: Path, fault: str, says: str) -> None:
    words = ("--device", "npu", "--simulate", f"npu:1,{fault}", "--parts", "engines")
    code, report, printed = verify(tmp_path, *words)
    assert code == 1
    assert says in failures(report)["resnet50 eager fp32"]
    assert "npu:0 FAILED: resnet50 eager fp32" in printed


def test_a_report_tells_nothing_of_the_machine() -> None:
    told = "GPU-12345678-1234-1234-1234-123456789abc in /home/ann/models/a.onnx, Serial Number: 0324518000123"
    kernel = "6.18.44-anns-9: Landlock 7, seccomp; torch 2.9.0-rc1"
    part = Part("doctor", [Finding("x", "PASS", told), Finding("y", "PASS", kernel)])
    report = VerifyReport("cuda:0", "Chip", "2026-01-01", {"torch": "2"}, [part])
    for text in (report.json(), report.markdown()):
        assert not any(secret in text for secret in ("12345678-", "ann", "models", "0324518000123"))
        assert "6.18.44: Landlock 7, seccomp; torch 2.9.0-rc1" in text
        assert "UUID in …/a.onnx, Serial Number: …" in text
