"""The figures of docs/reliability.md are those of a recorded run, and nothing else; how a run becomes the page."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.chaos_report import BEGIN, END, PAGE, RECORDED, FaultRow, Result, measured, page, read


def test_the_page_has_the_figures_of_the_recorded_run() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert page(text, read(RECORDED)) == text


def test_a_result_is_read_as_it_was_written(tmp_path: Path) -> None:
    row = FaultRow("worker killed", 3, 12, 1, 2, 34.4, 5.6)
    result = Result(
        "2026-01-02", "a processor", 2, 60, {"client": 1234}, 1, 2, 500, 12.3, 45.6, [row], {"threads": (8, 9)}
    )
    result.offended["no image"] = {"422 INVALID_IMAGE": 7}
    result.write(tmp_path / "result.json")
    found = read(tmp_path / "result.json")
    text = measured(found)
    assert text == measured(result)
    assert "1,234 requests of innocent clients, 1 lost, 2 wrong" in text
    assert "| worker killed | 3 | 12 | 1 | 2 | 34 | 5.6 |" in text
    assert "| threads | 8 | 9 |" in text
    assert "| no image | 422 INVALID_IMAGE: 7 |" in text
    assert page(f"before\n{BEGIN}old{END}after", found).count("old") == 0


def test_a_page_without_a_place_for_figures_is_refused() -> None:
    with pytest.raises(ValueError, match="substring not found"):
        page("no marks", Result("", "", 1, 1))
