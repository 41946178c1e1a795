"""The pages about the tools: made of the same tables, and naming the same options."""

from __future__ import annotations

import argparse
import importlib
import re
from pathlib import Path

import pytest

from anychip_tools.doctor import CHECKS
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
