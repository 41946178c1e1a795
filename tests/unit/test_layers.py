"""The rooms of the house: who may import whom, read from the sources without importing them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted(path for room in ("app", "models", "backends") for path in (ROOT / room).rglob("*.py"))
FORBIDDEN = {
    "app": {"ultralytics"},
    "models": {"ultralytics", "app", "backends", "fastapi", "starlette", "uvicorn", "prometheus_client"},
    "backends": {"ultralytics", "app", "models", "fastapi", "starlette", "uvicorn", "prometheus_client", "PIL"},
}
MAX_LINES = 450


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def imported(tree: ast.Module) -> Iterator[str]:
    """Top-level packages that a module imports anywhere, however it is written."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield (node.module or "").partition(".")[0]
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = ast.unparse(node.func)
            if called in ("__import__", "importlib.import_module", "import_module"):
                yield str(node.args[0].value).partition(".")[0]


def test_the_scan_sees_every_kind_of_import() -> None:
    text = "import a.b\ndef f():\n    from c.d import e\n    importlib.import_module('g.h')\n    __import__('i')\n"
    assert set(imported(ast.parse(text))) == {"a", "c", "g", "i"}


def test_the_rooms_are_not_empty() -> None:
    assert {name_of(path).partition("/")[0] for path in SOURCES} == set(FORBIDDEN)


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_dependencies_point_one_way(path: Path) -> None:
    room = name_of(path).partition("/")[0]
    assert not set(imported(ast.parse(path.read_text(encoding="utf-8")))) & FORBIDDEN[room]


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_a_module_says_what_it_owns_and_stays_small(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert ast.get_docstring(ast.parse(text)), "a module begins with what it owns and must not do"
    assert len(text.splitlines()) <= MAX_LINES
