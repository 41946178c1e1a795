"""What messages and pages tell to install: extras that there are, and never a name of ours from a registry."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
OURS = re.compile(r"anychip(-(ascend|compat|grpc|hosting|ocr|samples|tools))?")


def test_every_extra_that_is_asked_for_is_one():
    """Their names are checked nowhere else: a message may never be printed in any test."""
    text = (ROOT / "pyproject.toml").read_text()
    known = set(re.findall(r"^(\w+) = \[", text.partition("[project.optional-dependencies]")[2], re.MULTILINE))
    rooms = [ROOT / name for name in ("anychip_base", "app", "backends", "models")]
    asked = [
        each.args[0].value
        for room in (*rooms, *ROOT.glob("plugins/*/anychip_*"))
        for path in room.rglob("*.py")
        for each in ast.walk(ast.parse(path.read_text()))
        if isinstance(each, ast.Call) and ast.unparse(each.func) == "how_to_install"
        if isinstance(each.args[0], ast.Constant)
    ]
    assert len(asked) > 12
    assert set(asked) <= known


def installs(text: str) -> list[str]:
    """Return our packages that a text tells to install by their names."""
    commands = re.findall(r"pip3? install ((?:[^\n`;|#](?<!  #))+)", text)
    words = [word.strip("'\"(),.:").partition("[")[0] for each in commands for word in each.split()]
    return [word for word in words if OURS.fullmatch(word)]


def test_nothing_tells_to_install_a_name_of_ours_from_a_registry():
    """In no page that people read, and in no source that prints to them."""
    kinds = (".py", ".md", ".toml", ".yaml", ".yml", ".sh", ".html", ".js")
    files = [path for path in ROOT.glob("*") if path.suffix == ".md" or path.name.startswith("Dockerfile")]
    folders = ("anychip_base", "app", "backends", "benchmarks", "deploy", "docs", "models", "plugins")
    files += [path for name in folders for path in (ROOT / name).rglob("*") if path.suffix in kinds]
    listed = [path for path in files if path.is_file()]
    assert len(listed) > 400
    found = {str(path.relative_to(ROOT)): installs(path.read_text(encoding="utf-8")) for path in listed}
    assert {name: words for name, words in found.items() if words} == {}
