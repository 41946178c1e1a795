"""The table of suites: every test stands in one, and every path chooses what it may break."""

from __future__ import annotations

import ast
import fnmatch
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.environments.make import ENVIRONMENTS
from tests.suites import __main__ as commands
from tests.suites import choice
from tests.suites.table import BY_PATH, CHECK_LEAVES_OUT, NIGHTLY, ONE_BY_ONE, PACKAGES, PATHS, SUITES, Suite

ROOT = Path(__file__).resolve().parents[2]
SOURCES = choice.sources_of_tests()
NOBODY = "used_by_nobody"[3:] + ".py"  # Written otherwise, this file would be who uses it.


def files() -> Iterator[str]:
    """Every file of the repository: what is there, without what git ignores."""
    ignored = [".git", *(line.rstrip("/") for line in (ROOT / ".gitignore").read_text().split())]
    for folder, folders, names in os.walk(ROOT):
        slash = "/" if folder == str(ROOT) else ""  # In .gitignore, a pattern of it is for this folder alone.
        for found in (folders, names):
            found[:] = [name for name in found if not any(_matches(name, slash, each) for each in ignored)]
        yield from (Path(folder, name).relative_to(ROOT).as_posix() for name in names)


def _matches(name: str, slash: str, pattern: str) -> bool:
    return fnmatch.fnmatchcase(slash + name if pattern.startswith("/") else name, pattern)


def functions_of(path: str) -> set[str]:
    found = set()
    for node in ast.parse((ROOT / path).read_text(encoding="utf-8")).body:
        inside = [(f"{node.name}::", node.body)] if isinstance(node, ast.ClassDef) else [("", [node])]
        for before, body in inside:
            functions = (each for each in body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef))
            found |= {f"{before}{each.name}" for each in functions if each.name.startswith("test_")}
    return found


def test_every_test_stands_in_a_suite() -> None:
    named = {test for suite in SUITES.values() for test in suite.tests}
    lost = []
    for path in SOURCES:
        if not Path(path).name.startswith("test_") or any(f"{path}/".startswith(f"{each}/") for each in named):
            continue
        single = {test.partition("::")[2] for test in named if choice.file_of(test) == path}
        lost += [(path, test) for test in functions_of(path) - single]
    assert lost == []


def test_what_suites_name_is_there() -> None:
    named = {test for suite in SUITES.values() for test in (*suite.tests, *suite.without)} | {*CHECK_LEAVES_OUT}
    assert [test for test in named if not (ROOT / choice.file_of(test)).exists()] == []
    single = [test.partition("[")[0].partition("::") for test in named if "::" in test]
    assert single
    assert [(path, test) for path, _, test in single if test not in functions_of(path)] == []
    # pytest leaves out all that begin with the name of one that it is to leave out.
    assert [
        test for path, _, test in single if any(each != test and each.startswith(test) for each in functions_of(path))
    ] == []


def test_where_nothing_is_needed_nothing_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(commands, "plan", lambda: {"networks": []})
    for command in ("packages", "environments"):
        assert commands.main([command]) == 0
    assert capsys.readouterr().out == ""


def test_rows_and_suites_name_each_other_and_what_is_known() -> None:
    assert {suite for _, suites in PATHS for suite in suites} == set(BY_PATH)
    assert {package for suite in SUITES.values() for package in suite.programs} == set(PACKAGES)
    wanted = {target.removesuffix("-environment") for target in commands.environments(SUITES)}
    assert wanted == {*ENVIRONMENTS, "audit", "next"}


def test_every_file_of_the_repository_is_known() -> None:
    found = sorted(files())
    assert len(found) > 800
    assert [path for path in found if choice.chosen_by(path, SOURCES) is None] == []


@pytest.mark.parametrize(
    ("paths", "suites"),
    [
        (["README.md", "docs/api.md", "CHANGELOG.md"], set()),
        (["app/http/playground/static/page.js"], {"browser"}),
        (["Dockerfile.cpu"], {"images"}),
        (["plugins/ocr/anychip_ocr/reader.py"], {"ocr"}),
        (["models/onnx/file.py"], {"networks", "models", "engines"}),
        (
            ["constraints.txt", "docs/api.md"],
            {"install", "networks", "engines", "models", "libraries", "simulated"},
        ),
        (["tests/cpu/test_om.py"], {"simulated"}),
        (["tests/service/test_http.py", "tests/unit/test_docs.py", "plugins/grpc/tests/test_relay.py"], set()),
        (["tests/environments/make.py"], {"clients", "browser", "deployment", "images", "ocr"}),
        (["tests/support/export_comparison.py"], {"models"}),
        (["tests/service/test_chaos.py"], set()),
    ],
    ids=lambda value: ", ".join(sorted(value)) or "none",
)
def test_paths_choose_what_they_may_break(paths: list[str], suites: set[str]) -> None:
    assert choice.choose(paths, SOURCES).keys() == suites


@pytest.mark.parametrize(
    "path", [choice.EVERYTHING, "app/new_room/file.py", f"tests/support/{NOBODY}", "setup.cfg", "a/b.md"]
)
def test_a_path_that_nobody_knows_chooses_everything(path: str) -> None:
    assert choice.choose(["README.md", path], SOURCES) == {name: [path] for name in choice.ALL}
    assert set(BY_PATH) - set(choice.ALL) == {"clients", "browser", "deployment", "proxy", "images", "ocr"}


def test_what_tests_share_chooses_who_uses_it_also_by_others() -> None:
    sources = {
        "tests/cpu/test_om.py": "from tests.support.near import a",
        "tests/support/near.py": "from tests.support import (\n    far,\n    other,\n)",
        "tests/cpu/test_dvpp.py": "# far, near",
        "tests/service/conftest.py": "from tests.support.far import b",
        "tests/service/test_tls.py": "",
        "tests/support/words.py": 'FOLDER = Path(__file__).parent / "data"',
        "tests/cpu/test_gpu_kit.py": "import tests.support.words",
    }
    assert choice.users("tests/support/near.py", sources) == {"tests/cpu/test_om.py"}
    assert choice.users("tests/support/far.py", sources) == {"tests/cpu/test_om.py", "tests/service/test_tls.py"}
    assert choice.users("tests/support/data/a.json", sources) == {"tests/cpu/test_gpu_kit.py"}
    assert choice.users(f"tests/support/{NOBODY}", sources) == set()


def test_without_a_commit_that_has_landed_everything_is_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base, answers = tmp_path / "base", {"merge-base": "", "diff": "b.py\na.py\n", "ls-files": "c.py\n"}
    monkeypatch.setattr(choice, "_git", lambda root, words: answers.get(words[0]))
    assert choice.changed_paths(tmp_path, base) == [choice.EVERYTHING]
    base.write_text("main\n")
    assert choice.changed_paths(tmp_path, base) == [choice.EVERYTHING]
    base.write_text("0" * 40 + "\n")
    assert choice.changed_paths(tmp_path, base) == ["a.py", "b.py", "c.py"]
    del answers["merge-base"]  # git fails: it is no ancestor.
    assert choice.changed_paths(tmp_path, base) == [choice.EVERYTHING]


def test_suites_that_run_alike_are_one_and_run_nothing_twice() -> None:
    made = Suite("", ("tests/a.py::one", "tests/b.py"))
    several = {
        "a": Suite("", ("tests/a.py", "tests/b.py")),
        "slow": Suite("", ("tests/slow.py",), at_a_time=ONE_BY_ONE),
        "part": Suite("", ("tests/a.py::two", "tests/c.py")),
        "other": Suite("", ("tests/b.py",), environment=".venv-other"),
        "own": Suite("", ("tests/own",), by_itself=True),
        "ran": Suite("", ("tests/b.py",), at_a_time=2),
    }
    assert commands.together(several, done={"made": made}) == {
        "a part": replace(several["a"], tests=("tests/a.py", "tests/c.py"), without=("tests/a.py::one",)),
        **{name: several[name] for name in ("slow", "other", "own")},
    }
    assert set(" ".join(commands.together(BY_PATH)).split()) == set(BY_PATH)


def test_all_that_runs_somewhere_runs_at_night() -> None:
    at_night = commands.of_nightly(())
    assert {*NIGHTLY, "figures", "mutations"} <= set(at_night)
    ran = {(words[0], choice.file_of(word)) for words in at_night.values() for word in words if commands.ALL in words}
    for suite in BY_PATH.values():
        assert {(str(ROOT / suite.environment / "bin" / "python"), choice.file_of(test)) for test in suite.tests} <= ran
    marked = {path for path, source in choice.sources_of_tests().items() if "\n@pytest.mark.nightly" in source}
    assert marked
    assert marked <= {file for _, file in ran}
    assert [name for name, words in at_night.items() if "-n" not in words] == [
        "connections",
        "alone",
        "figures",
        "mutations",
    ]
