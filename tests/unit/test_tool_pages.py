"""The pages about the tools: made of the same tables, naming the same options, with output of the same form."""

from __future__ import annotations

import argparse
import importlib
import json
import re
from pathlib import Path

import pytest

from anychip_tools.doctor import CHECKS
from anychip_tools.doctor_vendor import Check
from app.cli import main
from benchmarks.troubleshooting import PAGES, page

DOCS = Path(__file__).parents[2] / "docs"
TOOLS = (DOCS / "tools.md").read_text(encoding="utf-8")
COMMANDS = ("ops", "validate", "bench", "tune", "profile")


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.name))
def test_the_page_of_troubles_is_the_one_that_the_tables_make(path: Path) -> None:
    assert path.read_text(encoding="utf-8") == page(path), "run python -m benchmarks.troubleshooting"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_of_a_command_is_in_the_page(command: str) -> None:
    parser = argparse.ArgumentParser()
    importlib.import_module(f"anychip_tools.{command}").add_arguments(parser)
    section = re.split(r"^## ", TOOLS, flags=re.MULTILINE)
    [text] = [part for part in section if part.startswith(f"anychip {command}")]
    own = [action for action in parser._actions if not (action.dest or "").startswith("setting_")]
    options = {option for action in own for option in action.option_strings if option.startswith("--")}
    assert not {option for option in options - {"--help", "--json"} if not re.search(rf"{option}\b", text)}


def test_every_check_of_the_doctor_is_in_the_page() -> None:
    assert not [name for name in CHECKS if f"`{name}`" not in TOOLS]


def shown(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line.rstrip() for line in capsys.readouterr().out.splitlines()]


def headings(command: str) -> list[str]:
    """Return the lines of the page's example of a command."""
    blocks = re.findall(r"^```\n\$ anychip (\S+).*?\n(.*?)^```$", TOOLS, re.MULTILINE | re.DOTALL)
    return [line for name, text in blocks if name == command for line in text.splitlines()]


def words(line: str) -> list[str]:
    return re.split(r"\s{2,}", line.strip())


def test_the_example_of_the_doctor_has_the_form_of_the_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [Check("torch", "PASS", "torch 2"), Check("port", "FAIL", "taken", "use another")]
    monkeypatch.setattr("anychip_tools.doctor.examine", lambda *_: iter(found))
    assert main(["doctor"]) == 1
    check, remedy = re.compile(r"(PASS|WARN|FAIL|SKIP)  ([a-z-]+) +\S.*"), re.compile(r" {20}-> \S.*")
    lines = shown(capsys)
    assert [bool(check.fullmatch(line)) for line in lines] == [True, True, False]
    assert remedy.fullmatch(lines[-1])
    example = headings("doctor")
    assert all(check.fullmatch(line) or remedy.fullmatch(line) for line in example)
    assert [match[2] for line in example if (match := check.fullmatch(line))] == list(CHECKS)
    assert any(remedy.fullmatch(line) for line in example)


def test_the_example_of_a_comparison_has_the_form_of_the_command(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for name, rate in (("before", 20.0), ("after", 10.0)):
        measured = {"engine": "eager", "precision": "fp32", "batch_size": 4, "images_per_s": rate}
        (tmp_path / f"{name}.json").write_text(json.dumps({"results": [measured], "environment": {"torch": name}}))
    assert main(["bench", "--compare", str(tmp_path / "before.json"), str(tmp_path / "after.json")]) == 1
    lines = [words(line) for line in shown(capsys)]
    example = [words(line) for line in headings("bench")]
    wanted = ["row", "figure", "before", "after", "better by"]
    assert wanted in lines
    assert wanted in example
    shown_row = next(line for line in lines if line[0].startswith("engine eager, precision fp32"))
    assert shown_row[1:] == ["images_per_s", "20", "10", "-50.0%", "slower"]
    rows = [line for line in example if line[0].startswith("engine ") and len(line) > 4]
    assert rows
    assert all(re.fullmatch(r"[+-][\d.]+%", line[4]) for line in rows)
