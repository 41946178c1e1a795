"""The reports in docs/reports, as `anychip verify` wrote them, and what is shown in a terminal."""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from anychip_tools import card_report
from anychip_tools import report as shown
from anychip_tools.verify.report import Finding, Part, VerifyReport
from app.cli import main
from benchmarks import hardware_row

DOCS = Path(__file__).resolve().parents[3] / "docs"
REPORTS = sorted((DOCS / "reports").glob("*.json"))


def read(path: Path) -> tuple[VerifyReport, bool]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    passed = found.pop("passed")
    parts = [
        Part(part["name"], [Finding(**finding) for finding in part["findings"]], part["seconds"])
        for part in found.pop("parts")
    ]
    return VerifyReport(**found, parts=parts), passed


@pytest.mark.parametrize("path", REPORTS, ids=lambda path: path.stem)
def test_both_forms_of_a_report_are_what_verify_makes_of_it(path: Path) -> None:
    report, passed = read(path)
    assert (report.passed, report.json()) == (passed, path.read_text(encoding="utf-8"))
    assert report.markdown() == path.with_suffix(".md").read_text(encoding="utf-8")


SENT = "in /home/ann/venv and /data/annabel, on host gpu-seven.acme; GPU-1a2b3c4d, Serial: 0324518"
SEEN = "in ~/venv and ~, on host HOST; UUID, Serial: …"


def test_a_stranger_s_file_tells_of_the_card_alone_and_becomes_a_row(tmp_path: Path, monkeypatch: Any) -> None:
    given = {"HOME": "/data/annabel", "USER": "annabel", "API_KEY": "s3cr3t", "CUDA_VISIBLE_DEVICES": "7"}
    monkeypatch.setattr("os.environ", {**os.environ, **given})
    monkeypatch.setattr("anychip_tools.facts._outside_rows", dict)
    monkeypatch.setattr("socket.gethostname", lambda: "gpu-seven.acme")
    monkeypatch.setattr(card_report, "run_group", lambda at, _: (0, json.dumps([at[at.index("app") + 1], SENT]), ""))
    docs, file, words = tmp_path / "docs", tmp_path / "card.json", ["report", "--verify", str(tmp_path), "--out"]
    (docs / "reports").mkdir(parents=True)
    for page in hardware_row._PAGES:
        shutil.copy(DOCS / page, docs)
    parts = [Part("doctor", [Finding("torch", "PASS")])]
    report = VerifyReport("npu:0", "Ascend <910B>", "2026-12-01", {"torch": "2.13.0"}, parts)
    replace(report, about={"simulated": "yes"}).write(tmp_path)
    for device, why in (("cuda", "no report of anychip verify"), ("npu", "its device is simulated")):
        assert main([*words, str(file), "--device", device]) == 0
        with pytest.raises(SystemExit, match=why):
            hardware_row.main([str(file), "--docs", str(docs)])
    for again in (1, 2):
        report.parts[0].findings.append(Finding("weights", "SKIP"))
        report.write(tmp_path)
        assert main([*words, str(file)]) == 0
        hardware_row.main([str(file), "--docs", str(docs)])
        for page in hardware_row._PAGES:
            [row] = re.findall(r"^\| Ascend 910B.*`npu`.*$", (docs / page).read_text("utf-8"), re.MULTILINE)
            assert ("(reports/npu-ascend-910b.md)" in row, f" {again} " in row) == (True, True)
    versions = {"torch": "2.13.0", "cann": "9.0.0", "torch_tensorrt": "2.13.0", "driver:ascend": "26.0"}
    named = hardware_row._software(report.about, versions)
    assert named == ["torch 2.13.0", "CANN 9.0.0", "torch_tensorrt 2.13.0", "driver 26.0"]
    monkeypatch.setattr(hardware_row, "read", lambda _: (replace(report, parts=[]), {}))
    with pytest.raises(hardware_row.NoReportError, match="has 1 checks that ran, and this one 0"):
        hardware_row.add(file, docs)
    sent = json.loads(text := file.read_text(encoding="utf-8"))
    assert [sent[part] for part in ("doctor", "devices")] == [[part, SEEN] for part in ("doctor", "devices")]
    assert (bool(sent["versions"]["torch"]), sent["variables"]["CUDA_VISIBLE_DEVICES"]) == (True, "7")
    assert not any(secret in text for secret in ("/ann", "annabel", "seven", "acme", "s3cr3t", "0324518", "1a2b"))


MESSAGE = "pip install 'anything[onnx]' :warning: [bold]net[/bold].onnx [/]"


def test_what_is_shown_is_shown_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    """rich takes words in brackets for markup, and words between colons for emoji; [/] ends the command."""
    console = shown.console()
    console.print(MESSAGE)
    console.print(shown.table(f"title {MESSAGE}", [f"column {MESSAGE}"], [[f"cell {MESSAGE}"]]))
    printed = capsys.readouterr().out
    assert [printed.count(f"{place}{MESSAGE}") for place in ("", "title ", "column ", "cell ")] == [4, 1, 1, 1]
