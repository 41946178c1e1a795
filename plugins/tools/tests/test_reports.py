"""The reports in docs/reports, as `anychip verify` wrote them, and what is shown in a terminal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from anychip_tools import report as shown
from anychip_tools.verify.report import Finding, Part, VerifyReport

DOCS = Path(__file__).resolve().parents[3] / "docs"
REPORTS = sorted((DOCS / "reports").glob("*.json"))


def read(path: Path) -> tuple[VerifyReport, bool]:
    """Read the report, and the `passed` that is written in it."""
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


MESSAGE = "pip install 'anything[onnx]' :warning: [bold]net[/bold].onnx [/]"


def test_what_is_shown_is_shown_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    """rich takes words in brackets for markup, and words between colons for emoji; [/] ends the command."""
    console = shown.console()
    console.print(MESSAGE)
    console.print(shown.table(f"title {MESSAGE}", [f"column {MESSAGE}"], [[f"cell {MESSAGE}"]]))
    printed = capsys.readouterr().out
    assert [printed.count(f"{place}{MESSAGE}") for place in ("", "title ", "column ", "cell ")] == [4, 1, 1, 1]
