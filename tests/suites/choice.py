"""Which suites a change chooses: from the paths that changed since what has landed.

Owns: the rules. A path of the product chooses what table.py says; a test chooses the suites that hold it; what tests
share chooses the suites of the tests that use it; a path that nobody knows chooses everything.
"""

from __future__ import annotations

import fnmatch
import functools
import re
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from tests.suites.table import BY_PATH, MAKE_TEST, NIGHTLY, PATHS, Suite

ROOT = Path(__file__).resolve().parents[2]
BASE = ROOT / ".ci" / "base"
"""The commit that has landed, beside which a change is judged. `make ci-base` writes it."""
EVERYTHING = "*"
"""In place of a changed path: nobody can say what changed."""

ALL = tuple(name for name, suite in BY_PATH.items() if not suite.by_its_paths_alone)
"""What is chosen where nobody can say what a change may break."""
START_PROCESSES = {"service", "stories", "devices"}
"""Suites of `make test` that use what tests share as others do."""


def dear(suite: Suite) -> bool:
    return bool(suite.programs or suite.wants or suite.environment != ".venv")


def matches(pattern: str, path: str) -> bool:
    if pattern.endswith("/"):
        return path.startswith(pattern)
    return path.count("/") == pattern.count("/") and fnmatch.fnmatchcase(path, pattern)


def file_of(test: str) -> str:
    """Return the file or folder of a test that a suite names: `tests/a.py::b` -> `tests/a.py`."""
    return test.partition("::")[0]


def holders(path: str, suites: Mapping[str, Suite]) -> set[str]:
    """Return the suites that hold a test file, or a folder of which it is a part."""
    return {
        name
        for name, suite in suites.items()
        if any(path == file_of(test) or path.startswith(f"{file_of(test)}/") for test in suite.tests)
    }


_NAMED = re.compile(r"tests[./]support[./](\w+)|from tests\.support import ([^()\n]+|\([^()]*\))")
_WORD = re.compile(r"[\"'](\w+)(?:\.\w+)?[\"']")


@functools.cache
def names_in(source: str) -> tuple[frozenset[str], frozenset[str]]:
    """Return what a source names: modules that tests share, and words in quotes, which may be parts of a path."""
    modules = {word for one, several in _NAMED.findall(source) for word in (one, *re.findall(r"\w+", several))}
    return frozenset(modules), frozenset(_WORD.findall(source))


def uses(source: str, shared: str) -> bool:
    """Say whether a source names a shared file: a module as it is imported, any other also by a word of its path."""
    modules, words = names_in(source)
    name = Path(Path(shared).parts[2]).stem
    return name in modules or (name in words and not re.fullmatch(r"tests/support/\w+\.py", shared))


def users(path: str, sources: Mapping[str, str]) -> set[str]:
    """Return the test files that use what they share: themselves, by other files, or by their folder's conftest.py."""
    found, waiting, seen = set(), [path], {path}
    while waiting:
        shared = waiting.pop()
        for other, text in sources.items():
            if other in seen or not uses(text, shared):
                continue
            seen.add(other)
            if other.startswith("tests/support/"):
                waiting.append(other)
            elif Path(other).name == "conftest.py":
                found |= {test for test in sources if Path(test).parent == Path(other).parent}
            else:
                found.add(other)
    return {test for test in found if Path(test).name.startswith("test_")}


def of_tests(path: str, sources: Mapping[str, str]) -> set[str] | None:
    """Return the suites that a path among the tests chooses, also those of `make test`; None: nobody uses it."""
    everyone = {**MAKE_TEST, **BY_PATH, **NIGHTLY}
    if found := holders(path, everyone):
        return found
    if path.startswith("tests/support/"):
        found = {suite for test in users(path, sources) for suite in holders(test, everyone)}
        if found & START_PROCESSES:  # `make test` has run it: what is dear to set up shows nothing new of it.
            found = {suite for suite in found if not dear(everyone[suite])}
        return found or None
    if path.startswith("tests/environments/"):
        return {key for key, suite in everyone.items() if suite.wants or suite.environment != ".venv"}
    if match := re.fullmatch(r"(tests/\w+)/conftest\.py", path):
        return {key for key, suite in everyone.items() if any(test.startswith(f"{match[1]}/") for test in suite.tests)}
    return None


def chosen_by(path: str, sources: Mapping[str, str]) -> set[str] | None:
    """Return the suites of BY_PATH that a changed path chooses; None: all, as nobody knows it."""
    is_test = re.match(r"plugins/\w+/tests/", path)  # The rows of a plugin are about what it is, not its tests.
    rows = [suites for pattern, suites in PATHS if matches(pattern, path) and not is_test]
    if rows:
        return {suite for suites in rows for suite in suites}
    found = of_tests(path, sources)
    return None if found is None else found & BY_PATH.keys()


def choose(paths: Iterable[str], sources: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the suites of BY_PATH that changed paths choose, in the table's order, each with the paths that do.

    `sources`: the Python files of the tests, by path.
    """
    why: dict[str, list[str]] = {name: [] for name in BY_PATH}
    for path in paths:
        found = chosen_by(path, sources)
        for name in ALL if found is None else found:
            why[name].append(path)
    return {name: reasons for name, reasons in why.items() if reasons}


def sources_of_tests(root: Path = ROOT) -> dict[str, str]:
    """Return the Python files of all tests, by path."""
    folders = (root / "tests", *root.glob("plugins/*/tests"))
    return {
        path.relative_to(root).as_posix(): path.read_text(encoding="utf-8")
        for folder in folders
        for path in folder.rglob("*.py")
    }


def changed_paths(root: Path = ROOT, base: Path = BASE) -> list[str]:
    """Return the paths that changed since the commit in `.ci/base`, and those changed here and not committed.

    Without that file, or where its commit is no ancestor, as in a clone without history, EVERYTHING.
    """
    commit = base.read_text(encoding="utf-8").strip() if base.exists() else ""
    if not re.fullmatch(r"[0-9a-f]{40}", commit):
        return [EVERYTHING]
    if _git(root, ("merge-base", "--is-ancestor", commit, "HEAD")) is None:
        return [EVERYTHING]
    changed = _changed_since(commit, root)
    return [EVERYTHING] if changed is None else changed


def changed_on_branch(root: Path = ROOT) -> list[str]:
    """Return the paths that changed since the branch left main, and those changed here and not committed."""
    return _changed_since((_git(root, ("merge-base", "main", "HEAD")) or "HEAD").strip(), root) or []


def _changed_since(commit: str, root: Path) -> list[str] | None:
    # Where a file moved, its old place counts, too.
    changed = _git(root, ("diff", "--name-only", "--no-renames", commit))
    added = _git(root, ("ls-files", "--others", "--exclude-standard"))
    return None if changed is None or added is None else sorted({*changed.splitlines(), *added.splitlines()})


def _git(root: Path, words: Sequence[str]) -> str | None:
    """Return what git prints; None where it fails or is not here."""
    try:
        done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout if done.returncode == 0 else None
