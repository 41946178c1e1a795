"""The commands behind `make check`, `make test`, `make nightly` and `.ci/run`.

    python3 -m tests.suites plan                      # what the paths that changed since .ci/base choose, and why
    python3 -m tests.suites packages                  # Debian's packages that this needs and that are not here
    python3 -m tests.suites environments              # targets of make that this needs
    .venv/bin/python -m tests.suites chosen           # runs it
    .venv/bin/python -m tests.suites run faults -- -x # runs suites by their names

Every phase is one pytest; the first that fails ends `test`, `check` and `chosen`, while `nightly` fails at its end.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from tests.suites.choice import ROOT, changed_on_branch, changed_paths, choose, file_of, sources_of_tests
from tests.suites.table import (
    ALL_PROCESSORS,
    BY_PATH,
    CHECK_LEAVES_OUT,
    MAKE_TEST,
    NIGHTLY,
    ONE_BY_ONE,
    PACKAGES,
    SUITES,
    Suite,
)

BIN = ROOT / ".venv" / "bin"
LINT = {
    "ruff": [str(BIN / "ruff"), "check"],
    "ruff format": [str(BIN / "ruff"), "format", "--check"],
    "mypy": [str(BIN / "mypy")],
}
EACH, ALL = "not nightly", "nightly or not nightly"
NO_TESTS = 5
"""pytest's exit status where it found none."""
_TIMED_OUT, _NOT_THERE = 124, 127
CHANGELOG = "CHANGELOG.md"
PROMISES = tuple(f"docs/{name}.md" for name in ("api", "observability", "predict", "protocols", "settings", "tools"))
"""Pages of names that clients and dashboards depend on. Tests fail if a new name is not in its page."""
Phases = Mapping[str, Sequence[str]]
"""Commands by the names of their phases."""


@dataclass(frozen=True)
class Outcome:
    name: str
    status: int
    wall_s: float

    def __str__(self) -> str:
        said = "passed" if self.status == 0 else "has no such test" if self.status == NO_TESTS else "FAILED"
        return f"{self.name:<14} {said:<16} {self.wall_s:6.0f} s"


def command(suite: Suite, marked: str, more: Sequence[str] = ()) -> list[str]:
    """Return the command that runs a suite's tests with these marks; `more` are further words for pytest."""
    ignored = [f"--ignore={path}" if file_of(path) == path else f"--deselect={path}" for path in suite.without]
    processes = [] if suite.at_a_time == ONE_BY_ONE else ["-n", str(suite.at_a_time)]
    if suite.at_a_time == ALL_PROCESSORS:
        processes = ["-n", "logical", "--maxprocesses", "8"]
    if processes:
        processes += ["--dist", "loadgroup", "--no-loadscope-reorder"]
    python = str(ROOT / suite.environment / "bin" / "python")
    return [python, "-m", "pytest", "-m", marked, *processes, *ignored, *suite.tests, *more]


def run(name: str, words: Sequence[str], limit_s: float | None = None) -> Outcome:
    """Run a command to its end, or stop it and all that is in its session once the limit is over."""
    began = time.monotonic()
    try:
        started = subprocess.Popen(words, cwd=ROOT, start_new_session=limit_s is not None)
    except FileNotFoundError as error:  # Of an environment that could not be made.
        print(f"anychip: {error}", file=sys.stderr)
        return Outcome(name, _NOT_THERE, 0)
    try:
        status = started.wait(None if limit_s is None else max(limit_s, 0))
    except subprocess.TimeoutExpired:
        os.killpg(started.pid, signal.SIGKILL)
        started.wait()
        status = _TIMED_OUT
    return Outcome(name, status, time.monotonic() - began)


def named_tests(more: Sequence[str]) -> bool:
    """Say whether pytest's words name files of tests, and not only how they run."""
    return any((ROOT / file_of(word)).exists() and not word.startswith("-") for word in more)


def phases(suites: Mapping[str, Suite], marked: str, more: Sequence[str]) -> dict[str, list[str]]:
    """Return a phase for each suite; where words name tests, one for these alone."""
    if named_tests(more):
        return {"tests": command(Suite("what was named", ()), marked, more)}
    return {name: command(suite, marked, more) for name, suite in suites.items()}


def together(suites: Mapping[str, Suite], done: Mapping[str, Suite] = MappingProxyType({})) -> dict[str, Suite]:
    """Return suites as one each where they run alike, and without what those of `done` have run."""
    alike: dict[tuple[object, ...], dict[str, Suite]] = {}
    for name, suite in suites.items():
        alone = name if suite.by_itself else ""
        alike.setdefault((suite.environment, suite.at_a_time, suite.without, alone), {})[name] = suite
    found = {}
    for members in alike.values():
        first = next(iter(members.values()))
        ran = {test for suite in done.values() if suite.environment == first.environment for test in suite.tests}
        tests = dict.fromkeys(test for suite in members.values() for test in suite.tests if test not in ran)
        whole = tuple(test for test in tests if test == file_of(test) or file_of(test) not in tests)
        if whole:
            left = (*first.without, *sorted(test for test in ran if file_of(test) in whole))
            found[" ".join(members)] = replace(first, tests=whole, without=left)
    return found


def of_check(more: Sequence[str]) -> dict[str, list[str]]:
    unit = MAKE_TEST["unit"]
    tests = tuple(test for test in unit.tests if test not in CHECK_LEAVES_OUT)
    without = tuple(test for test in CHECK_LEAVES_OUT if test not in unit.tests)
    return {**LINT, **phases({"logic": replace(unit, tests=tests, without=without)}, EACH, more)}


def of_test(more: Sequence[str]) -> dict[str, list[str]]:
    return {**LINT, **phases(together(MAKE_TEST), EACH, more)}


def of_nightly(more: Sequence[str]) -> dict[str, list[str]]:
    """Return the phases of `make nightly`: what `make test` leaves out, tests marked `nightly`, what the service
    itself costs in seconds, the planted faults.
    """
    if named_tests(more):
        return phases({}, ALL, more)
    return {
        **phases(together(BY_PATH, done=NIGHTLY), ALL, more),
        **phases(NIGHTLY, ALL, more),
        "figures": [str(BIN / "python"), "-m", "benchmarks.overhead", "--rounds", "3"],
        "mutations": [str(BIN / "python"), "-m", "tests.support.mutations"],
    }


def finished(
    wanted: Phases,
    *,
    may_be_empty: Callable[[str], bool] = lambda name: False,
    keep_going: bool = False,
    limit_s: float | None = None,
) -> int:
    """Run phases, print what became of each, and return an exit status: 0 where all ran and passed."""
    began = time.monotonic()
    outcomes: list[Outcome] = []
    for name, words in wanted.items():
        print(f"\n== {name}", flush=True)
        left_s = None if limit_s is None else limit_s - (time.monotonic() - began)
        outcome = run(name, words, left_s)
        if outcome.status == NO_TESTS and may_be_empty(name):
            outcome = replace(outcome, status=0)
        outcomes.append(outcome)
        if outcome.status and not keep_going:
            break
    print()
    for outcome in outcomes:
        print(outcome)
    for name in list(wanted)[len(outcomes) :]:
        print(f"{name:<14} did not run")
    status = next((each.status for each in outcomes if each.status), 0)
    total = Outcome("all", status, time.monotonic() - began)
    print(total, flush=True)
    return total.status


def plan() -> dict[str, list[str]]:
    """Return the suites that the paths choose that have changed, each with these paths."""
    return choose(changed_paths(), sources_of_tests())


def missing_packages(names: Iterable[str]) -> list[str]:
    """Return Debian's packages that suites need and that are not here."""
    wanted = {package for name in names for package in SUITES[name].programs}
    return [
        package
        for package, here in PACKAGES.items()
        if package in wanted and subprocess.run(["sh", "-c", here], capture_output=True, check=False).returncode
    ]


def environments(names: Iterable[str]) -> list[str]:
    """Return the targets of make that make the environments of suites, beside `.venv`."""
    suites = [SUITES[name] for name in names]
    wanted = {suite.environment.removeprefix(".venv-") for suite in suites if suite.environment != ".venv"}
    return [f"{name}-environment" for name in sorted(wanted.union(*(suite.wants for suite in suites)))]


def reminders(changed: Collection[str], root: Path = ROOT) -> list[str]:
    """Return what no test can see: a sentence for each page of the changed paths that did not change with another."""
    said = []
    for page in sorted(path for path in changed if path.endswith(".md") and (root / path).exists()):
        chinese = f"{page.removesuffix('.md')}.zh-CN.md"
        if (root / chinese).exists() and chinese not in changed:
            said.append(f"{page} changed, {chinese} did not: does it still say the same?")
    noticed = [page for page in PROMISES if page in changed]
    if noticed and CHANGELOG not in changed:
        said.append(f"{', '.join(noticed)} changed, {CHANGELOG} did not: a change that people notice has a line there.")
    return said


def parsed(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.suites", description="Suites of tests.")
    named = parser.add_subparsers(dest="command", required=True)
    for name in ("check", "test", "nightly"):
        named.add_parser(name, help=f"run what make {name} runs")
    named.add_parser("plan", help="print the suites that the changed paths choose, and why")
    for name, text in (
        ("packages", "Debian's packages that they need and that are not here"),
        ("environments", "the targets of make that they need"),
    ):
        needs = named.add_parser(name, help=f"print {text}")
        needs.add_argument("suites", nargs="*", help="these suites, in place of those that paths choose")
    chosen = named.add_parser("chosen", help="run what `make test` has not run of them")
    chosen.add_argument("--limit-s", type=float, help="fail what is not done by then")
    by_name = named.add_parser("run", help="run suites by their names")
    by_name.add_argument("--each", action="store_true", help="every file by itself, to see what takes how long")
    by_name.add_argument("suites", nargs="+", choices=SUITES)
    end = list(words).index("--") if "--" in words else len(words)
    options = parser.parse_args(words[:end])
    options.more = list(words[end + 1 :])
    return options


def main(words: Sequence[str]) -> int:
    options = parsed(words)
    if options.command in ("check", "test", "nightly"):
        wanted = {"check": of_check, "test": of_test, "nightly": of_nightly}[options.command](options.more)
        nightly = options.command == "nightly"
        status = finished(wanted, may_be_empty=lambda name: nightly or bool(options.more), keep_going=nightly)
        if options.command == "check":
            for each in reminders(changed_on_branch()):
                print(f"note: {each}", flush=True)
        return status
    if options.command == "run":
        suites = {name: SUITES[name] for name in options.suites}
        if options.each:
            suites = {test: replace(suite, tests=(test,)) for suite in suites.values() for test in suite.tests}
        wanted = phases(suites, EACH, options.more)
        return finished(wanted, may_be_empty=lambda name: bool(options.more) or options.each, keep_going=options.each)
    chosen = plan()
    wanted_by = getattr(options, "suites", None) or chosen
    if options.command == "plan":
        for name, paths in chosen.items():
            others = f" and {len(paths) - 3} more" if len(paths) > 3 else ""
            print(f"{name:<14} {', '.join(paths[:3])}{others}")
    elif options.command in ("packages", "environments"):
        needs_of = missing_packages if options.command == "packages" else environments
        for each in needs_of(wanted_by):  # Nothing needed is no line: make takes an empty one for a file's name.
            print(each)
    else:
        wanted = phases(together({name: BY_PATH[name] for name in chosen}, done=MAKE_TEST), EACH, ())
        return finished(wanted, limit_s=options.limit_s)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
