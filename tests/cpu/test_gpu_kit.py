"""benchmarks/gpu without a card: every question runs, answers in JSON and text, and has its row in the page."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import __main__ as kit

ROOT = Path(__file__).parents[2]
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


def test_a_question_is_a_process_of_its_own_and_its_end_is_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["benchmarks.gpu", "inductor", "--device", "cpu", "--dry-run", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", words)
    assert kit.main() == 0
    assert "every question has its answer" in capsys.readouterr().out
    [row] = json.loads((tmp_path / "inductor.json").read_text())["rows"]
    assert row["status"] == 0
    assert row["said"].startswith("exported")
    assert "said" in (tmp_path / "inductor.txt").read_text()
    monkeypatch.setattr(sys, "argv", [*words, "--limit-s", "0.01"])
    assert kit.main() == 1
    assert "inductor: not done within 0.01 s" in capsys.readouterr().out


def test_the_page_has_every_question_in_order() -> None:
    page = (ROOT / "docs" / "gpu-kit.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| `([\w-]+)` \|", page, re.MULTILINE)[: len(kit.QUESTIONS)] == list(kit.QUESTIONS)


def test_the_contract_suite_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = answer("contract", tmp_path, monkeypatch)
    assert found["status"] == 0
    assert "device_contract.py" in found["command"]
    listed = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", "--list"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert all(f"{name}:" in listed.stdout for name in kit.QUESTIONS)
