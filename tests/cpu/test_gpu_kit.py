"""benchmarks/gpu without a card: questions answer with figures, and commands have the options that they are given."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import __main__ as kit

COMMANDS = {name for name, question in kit.QUESTIONS.items() if question.module.startswith("commands:")}
FIGURES = {
    "link": ("pageable_in_gb_per_s", "pinned_out_gb_per_s"),
    "profile": ("replay_ms", "engine_images_per_s", "bytes_out"),
    "head": ("all_ms", "best_ms"),
    "decoders": ("pixels_off_mean", "lists_of_2_files_per_s"),
    "int8": ("fp32_us",),
    "autotune": ("eager_captured_ms", "autotuned_captured_ms"),
}


def answer(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """As its process would, in this one."""
    words = ["benchmarks.gpu", name, "--child", "--device", "cpu", "--dry-run", "--out", str(folder)]
    monkeypatch.setattr(sys, "argv", words)
    assert kit.main() == 0
    found: dict[str, Any] = json.loads((folder / f"{name}.json").read_text())
    assert (found["question"], found["dry_run"]) == (name, True)
    return found


@pytest.mark.parametrize("name", FIGURES)
def test_it_answers_with_figures(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = answer(name, tmp_path, monkeypatch)["rows"]
    assert rows
    assert not any("refused" in row for row in rows)
    for figure in FIGURES[name]:
        assert all(row[figure] >= 0 for row in rows)
    if name == "head":
        assert all(row["of_best_scores_off_by"] < 1e-5 for row in rows)
    if name == "decoders":
        assert rows[0]["pixels_off_most"] == 0


@pytest.mark.parametrize("name", sorted(COMMANDS - {"contract"}))
def test_commands_have_the_options_that_they_are_given(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = answer(name, tmp_path, monkeypatch)
    assert (found["status"], found["unknown"]) == (0, [])
