"""The layout of the tests: what they share is in tests/support, and no test module imports another."""

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
MODULES = sorted(TESTS.rglob("*.py"))
SHARED = ("tests.support", "tests.environments")


def imported(path):
    """Every module of tests/ that a file imports, also where the import is inside a function."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            yield from (
                f"{node.module}.{alias.name}" for alias in node.names if (node.module or "").startswith("tests")
            )
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("tests"))


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(TESTS)))
def test_no_test_module_is_imported(path):
    assert [name for name in imported(path) if not f"{name}.".startswith(tuple(f"{one}." for one in SHARED))] == []


def test_every_test_module_is_in_a_room():
    rooms = {"unit", "cpu", "simulated", "service", "deploy"}
    assert [
        path for path in TESTS.rglob("test_*.py") if path.parent.parent != TESTS or path.parent.name not in rooms
    ] == []
