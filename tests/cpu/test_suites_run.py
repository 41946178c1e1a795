"""Phases of tests run one after the other: what fails, what did not run and what time it took is said."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.suites import choice

ROOT = Path(__file__).resolve().parents[2]


def ran(phases: dict[str, str], options: str = "") -> subprocess.CompletedProcess[str]:
    """Phases by their Python code, in a process of their own: it waits for all children there are."""
    wanted = {name: [sys.executable, "-c", code] for name, code in phases.items()}
    code = f"import sys; from tests.suites.__main__ import finished; sys.exit(finished({wanted!r}, {options}))"
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )


def test_the_first_that_fails_ends_it_and_what_did_not_run_is_named() -> None:
    done = ran({"one": "", "two": "raise SystemExit(3)", "three": "print('here')"})
    assert done.returncode == 3
    assert re.search(r"^one +passed", done.stdout, re.MULTILINE)
    assert re.search(r"^two +FAILED", done.stdout, re.MULTILINE)
    assert re.search(r"^three +did not run", done.stdout, re.MULTILINE)
    assert "here" not in done.stdout


def test_no_tests_are_a_failure_but_where_somebody_chose_some() -> None:
    phases = {"one": "raise SystemExit(5)"}
    assert ran(phases).returncode == 5
    assert ran(phases, "may_be_empty=lambda name: True").returncode == 0


def test_what_is_not_done_in_time_has_failed() -> None:
    done = ran({"one": "import time; time.sleep(100)", "two": "print('here')"}, "limit_s=1")
    assert done.returncode == 124
    assert re.search(r"^two +did not run", done.stdout, re.MULTILINE)


def test_the_processor_time_of_what_children_leave_behind_counts(tmp_path: Path) -> None:
    burn = (
        f"import pathlib, time\nwhile time.process_time() < 2: pass\npathlib.Path({str(tmp_path / 'burnt')!r}).touch()"
    )
    leaves = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {burn!r}], start_new_session=True)"
    waits = f"import os, time\nwhile not os.path.exists({str(tmp_path / 'burnt')!r}): time.sleep(0.05)"
    done = ran({"one": leaves, "two": waits})
    [used] = re.findall(r"^all .* (\d+) s of a processor", done.stdout, re.MULTILINE)
    assert int(used) >= 2


def test_git_says_what_changed_since_the_commit_that_has_landed(tmp_path: Path) -> None:
    def git(*words: str) -> str:
        who = ("-c", "user.name=a", "-c", "user.email=a@example.com")
        done = subprocess.run(["git", *who, *words], cwd=tmp_path, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    git("init", "--quiet")
    for name in ("kept", "moved", "changed"):
        (tmp_path / name).write_text(name * 20)
    git("add", ".")
    git("commit", "--quiet", "-m", "landed")
    base = tmp_path / "base"
    base.write_text(git("rev-parse", "HEAD"))
    git("mv", "moved", "new place")
    (tmp_path / "changed").write_text("other")
    git("commit", "--quiet", "-a", "-m", "change")
    (tmp_path / "added").touch()
    assert choice.changed_paths(tmp_path, base) == ["added", "base", "changed", "moved", "new place"]
    git("checkout", "--quiet", "--orphan", "other")
    git("commit", "--quiet", "-m", "no descendant")
    assert choice.changed_paths(tmp_path, base) == [choice.EVERYTHING]
