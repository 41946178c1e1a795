"""The layout of the tests: what they share is in tests/support, no test module imports another, and here no test starts
a process."""

import ast
import multiprocessing
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.mutations import MUTATIONS, ROOT, planted
from tests.support.no_processes import GUARD, ProcessStartedError

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


STARTS_A_SERVICE = {"running", "serving"}
OF_FAULTS = [f"service/test_{name}.py" for name in ("chaos", "faults", "limits", "stalls")]
OF_FAULTS_WITHOUT_A_SERVICE = [f"simulated/test_{name}.py" for name in ("decoders", "fork_server", "worker_process")]


@pytest.mark.parametrize("name", OF_FAULTS)
def test_tests_of_faults_and_limits_look_whether_the_service_answers_and_what_holds_it_up(name):
    """With the fixture `serve`, or with `answering` or `observed` itself."""
    text = (TESTS / name).read_text(encoding="utf-8")
    names = {each.rpartition(".")[2] for each in imported(TESTS / name)}
    assert names & {"answering", "observed"} or re.search(r"def test_\w+\(.*\bserve\b", text)
    assert not names & STARTS_A_SERVICE or names & {"answering", "observed"}


@pytest.mark.parametrize("name", OF_FAULTS_WITHOUT_A_SERVICE)
def test_tests_of_faults_without_a_service_guard_their_own_loop(name):
    assert any(each.startswith("tests.support.loop_guard.guarded") for each in imported(TESTS / name))


def test_every_test_module_is_in_a_room():
    rooms = {"acceptance", "unit", "virtual", "cpu", "simulated", "service", "deploy"}
    assert [
        path for path in TESTS.rglob("test_*.py") if path.parent.parent != TESTS or path.parent.name not in rooms
    ] == []


STARTS = {
    "subprocess": lambda: subprocess.run([sys.executable, "-V"], check=False),
    "system": lambda: os.system("true"),
    "fork": os.fork,
    "multiprocessing": lambda: multiprocessing.get_context("spawn").Process(target=print).start(),
}


@pytest.mark.parametrize("start", STARTS)
def test_a_process_is_not_started_in_this_room(start):
    with pytest.raises(ProcessStartedError):
        STARTS[start]()
    assert len(GUARD.tried) == 1
    GUARD.tried.clear()  # Else this test fails, too.


@pytest.mark.xdist_group("kept together")
@pytest.mark.skipif("PYTEST_XDIST_WORKER" not in os.environ, reason="one process has every test")
def test_processes_of_the_tests_know_groups(request):
    """Where they do not, nothing fails: each process starts every service that a file shares, and all takes longer."""
    assert request.node.nodeid.endswith("@kept together")


def test_each_fault_of_the_list_can_still_be_planted():
    for mutation in MUTATIONS:
        assert planted(mutation, ROOT) != (ROOT / mutation.file).read_text(), mutation.fault
        file, _, name = mutation.test.partition("::")
        path = next(path for path in TESTS.glob(f"*/{file}") if path.parent.name in ("unit", "virtual"))
        assert f"def {name}" in path.read_text(encoding="utf-8"), mutation.fault
