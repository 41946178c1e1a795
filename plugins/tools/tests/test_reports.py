"""The reports in docs/reports: as `anychip verify` wrote them, with nobody's names, and listed where people look."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from anychip_tools.verify.report import Finding, Part, VerifyReport

DOCS = Path(__file__).resolve().parents[3] / "docs"
REPORTS = sorted((DOCS / "reports").glob("*.json"))


def read(path: Path) -> tuple[VerifyReport, bool]:
    """The report, and whether it says of itself that it has passed."""
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    passed = found.pop("passed")
    parts = [
        Part(part["name"], [Finding(**finding) for finding in part["findings"]], part["seconds"])
        for part in found.pop("parts")
    ]
    return VerifyReport(**found, parts=parts), passed


def test_there_are_reports() -> None:
    assert REPORTS


@pytest.mark.parametrize("path", REPORTS, ids=lambda path: path.stem)
def test_both_forms_of_a_report_are_what_verify_makes_of_it(path: Path) -> None:
    report, passed = read(path)
    assert (report.passed, report.json()) == (passed, path.read_text(encoding="utf-8"))
    assert report.markdown() == path.with_suffix(".md").read_text(encoding="utf-8")


@pytest.mark.parametrize("page", ["hardware.md", "hardware.zh-CN.md"])
@pytest.mark.parametrize("path", REPORTS, ids=lambda path: path.stem)
def test_every_report_has_its_row(path: Path, page: str) -> None:
    report, passed = read(path)
    [row] = re.findall(rf"^\| .*\(reports/{re.escape(path.stem)}\.md\).*$", (DOCS / page).read_text(), re.MULTILINE)
    assert report.device_name in row
    assert report.date in row
    assert passed
    assert "passed" in row or "通过" in row
