"""No test asserts what a real clock says: on a busy machine that says nothing about the product.

What a test waits for it waits for with an `until` of tests/support (`load` in a loop, `work` in none), which fails
where it never comes about. What is measured in seconds is marked `nightly`, or is in benchmarks/.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CLOCK = re.compile(
    r"(.*(time|timeit|loop|process|get_running_loop\(\)|Process\(.*\))\.)?"
    r"(monotonic|perf_counter|process_time|thread_time|default_timer)(_ns)?"
    r"|.*(time|loop|get_running_loop\(\))\.time(_ns)?|timeit\.(timeit|repeat)|.*(process|Process\(.*\))\.cpu_times"
)
"""`time.monotonic`, `loop.time`, `asyncio.get_running_loop().time`, `perf_counter`, `psutil.Process().cpu_times`."""
ARITHMETIC = {"max", "min", "abs", "round", "int", "float", "sum", "sorted", "any", "all", "len"}
MEASURES = {"nightly"}
SHARED = {"tests/support/loop_guard.py", "tests/support/liveness.py"}
"""These keep real time, and have a reason."""
Function = ast.FunctionDef | ast.AsyncFunctionDef


def told_by_a_clock(node: ast.AST, names: set[str]) -> bool:
    """Return True if a clock determines the value. Other calls with a time, as with a deadline, do not count."""
    if isinstance(node, ast.Name) and node.id in names:
        return True
    if isinstance(node, ast.Call) and not (isinstance(node.func, ast.Name) and node.func.id in ARITHMETIC):
        return CLOCK.fullmatch(ast.unparse(node.func)) is not None
    return any(told_by_a_clock(each, names) for each in ast.iter_child_nodes(node))


def assigned(node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
    """Yield what a statement or `:=` assigns: target and value, those of tuples one by one."""
    if isinstance(node, ast.AugAssign | ast.NamedExpr):
        yield node.target, node.value
    elif isinstance(node, ast.Assign):
        for target in node.targets:
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                yield from zip(target.elts, node.value.elts, strict=False)
            else:
                yield target, node.value


def clock_names(function: ast.AST) -> set[str]:
    """Names whose value comes of a clock, also by way of others."""
    pairs = [pair for node in ast.walk(function) for pair in assigned(node)]
    names: set[str] = set()
    while True:
        before = len(names)
        for target, value in pairs:
            if told_by_a_clock(value, names):
                stored = (each for each in ast.walk(target) if isinstance(each, ast.Name))
                names |= {each.id for each in stored if isinstance(each.ctx, ast.Store)}
        if len(names) == before:
            return names


def measures(marks: ast.AST) -> bool:
    """`pytest.mark.nightly`, and not among the cases of a parameter."""
    if isinstance(marks, ast.Attribute):
        return marks.attr in MEASURES
    return isinstance(marks, ast.List | ast.Tuple) and any(map(measures, marks.elts))


def asserted(tree: ast.Module) -> Iterator[int]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and "pytestmark" in map(ast.unparse, node.targets) and measures(node.value):
            return
    exempt = {
        id(inner)
        for each in ast.walk(tree)
        if isinstance(each, Function) and any(map(measures, each.decorator_list))
        for inner in ast.walk(each)
    }
    for function in ast.walk(tree):
        if not isinstance(function, Function) or id(function) in exempt:
            continue
        names = clock_names(function)
        for inner in ast.walk(function):
            if isinstance(inner, ast.Assert) and id(inner) not in exempt:
                compared = [each for each in ast.walk(inner.test) if isinstance(each, ast.Compare)]
                if any(told_by_a_clock(each, names) for each in compared):
                    yield inner.lineno


def test_no_test_compares_what_a_clock_says():
    files = [path for room in ("tests", "plugins") for path in (ROOT / room).rglob("*.py") if "tests" in path.parts]
    found = set()
    for path in files:
        name = str(path.relative_to(ROOT))
        if name not in SHARED and (name.startswith("tests/") or "/tests/" in name):
            found |= {f"{name}:{line}" for line in asserted(ast.parse(path.read_text(encoding="utf-8")))}
    assert sorted(found) == []


@pytest.mark.parametrize(
    ("code", "lines"),
    [
        ("def test():\n began = time.monotonic()\n assert time.monotonic() - began < 1", [3]),
        ("@pytest.mark.nightly\ndef test():\n assert time.monotonic() < 1", []),
        ("pytestmark = [pytest.mark.nightly, pytest.mark.cold]\ndef test():\n assert time.monotonic() < 1", []),
        ("@parametrize('x', [pytest.param(1, marks=pytest.mark.nightly)])\ndef t(x):\n assert time.time() < x", [3]),
        ("def test():\n deadline = time.monotonic() + 9\n run(deadline)\n assert count == 3", []),
        ("def test(clock):\n assert clock.now_s < 3", []),
    ],
)
def test_what_is_found(code, lines):
    assert list(asserted(ast.parse(code))) == lines
