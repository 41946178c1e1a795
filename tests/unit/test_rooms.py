"""The layout of the tests: what they share is in tests/support, and no test module imports another."""

import ast
from pathlib import Path

from tests.support.mutations import MUTATIONS, ROOT, planted

TESTS = Path(__file__).parents[1]
MODULES = sorted(TESTS.rglob("*.py"))
SHARED = ("tests.support", "tests.environments", "tests.suites")


def imported(path):
    """Every module of tests/ that a file imports, also where the import is inside a function."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            yield from (
                f"{node.module}.{alias.name}" for alias in node.names if (node.module or "").startswith("tests")
            )
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("tests"))


def test_no_test_module_is_imported():
    shared = tuple(f"{one}." for one in SHARED)
    found = [(str(path.relative_to(TESTS)), name) for path in MODULES for name in imported(path)]
    assert len(found) > 100
    assert [(path, name) for path, name in found if not f"{name}.".startswith(shared)] == []


def test_each_fault_of_the_list_can_still_be_planted():
    for mutation in MUTATIONS:
        assert planted(mutation, ROOT) != (ROOT / mutation.file).read_text(), mutation.fault
        file, _, name = mutation.test.partition("::")
        path = next(path for path in TESTS.glob(f"*/{file}") if path.parent.name in ("unit", "virtual"))
        assert f"def {name}" in path.read_text(encoding="utf-8"), mutation.fault
