"""The reports in docs/reports, as `anychip verify` wrote them, with nobody's names; and what is shown in a terminal."""

from __future__ import annotations

import ast
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest

from anychip_tools import report as shown
from anychip_tools.verify.report import Finding, Part, VerifyReport
from app import telling

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


MESSAGE = "pip install 'anything[onnx]' :warning: [bold]net[/bold].onnx [/]"


def test_what_is_shown_is_shown_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    """rich takes words in brackets for markup, and words between colons for emoji; [/] ends the command."""
    console = shown.console()
    console.print(MESSAGE)
    console.print(shown.table(f"title {MESSAGE}", [f"column {MESSAGE}"], [[f"cell {MESSAGE}"]]))
    printed = capsys.readouterr().out
    assert [printed.count(f"{place}{MESSAGE}") for place in ("", "title ", "column ", "cell ")] == [4, 1, 1, 1]


def test_a_task_beside_a_bar_is_shown_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    output = io.StringIO()
    monkeypatch.setattr("sys.stderr", output)
    with shown.progress(quiet=True) as bars:
        bars.add_task(MESSAGE, total=1)
        bars.console.print(bars.get_renderable(), width=400)
    assert MESSAGE.replace(":warning:", "⚠") in output.getvalue() or MESSAGE in output.getvalue()


ROOT = DOCS.parent


def test_nothing_of_the_product_lets_rich_read_markup() -> None:
    rooms = [*(ROOT / name for name in ("app", "backends", "models")), *ROOT.glob("plugins/*/anychip_*")]
    made = [
        (path.name, ast.unparse(node))
        for room in rooms
        for path in room.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("Console", "TextColumn")
    ]
    assert len(made) >= 4
    assert [text for text in made if "markup=False" not in text[1]] == []


def test_where_no_terminal_is_lines_say_how_far_the_work_is(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(telling, "_EVERY_S", 0.01)
    said = ""
    with shown.progress() as bars:
        task = bars.add_task("fp32", total=3)
        bars.advance(task)
        while "fp32: 1 of 3 done, 0 s\n" not in said:
            said += capfd.readouterr().err
        bars.advance(task)
        while "fp32: 2 of 3 done, 0 s\n" not in said:
            said += capfd.readouterr().err
    with telling.telling("opening cars"):
        while "opening cars, 0 s\n" not in said:
            said += capfd.readouterr().err
    capfd.readouterr()
    with shown.progress(quiet=True) as bars:
        bars.add_task("fp32", total=3)
    assert capfd.readouterr().err == ""
