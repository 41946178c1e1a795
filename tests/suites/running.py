"""Runs phases of tests one after the other, and says how long each took, by the clock and by the processor.

Owns: the pytest command of a suite, and the count of processor time of all processes that it started, also of those
that its own processes left behind. Must not know which suites there are.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from tests.suites.choice import ROOT, file_of
from tests.suites.table import ALL_PROCESSORS, ONE_BY_ONE, Suite

NO_TESTS = 5
"""pytest's exit status where it found none."""
_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
_TIMED_OUT, _NOT_THERE = 124, 127


@dataclass(frozen=True)
class Outcome:
    """What became of a phase."""

    name: str
    status: int
    wall_s: float
    processor_s: float

    def __str__(self) -> str:
        """Return the line that is printed of it."""
        said = "passed" if self.status == 0 else "has no such test" if self.status == NO_TESTS else "FAILED"
        return f"{self.name:<14} {said:<16} {self.wall_s:6.0f} s {self.processor_s:8.0f} s of a processor"


def processes(at_a_time: int) -> list[str]:
    """Return pytest's words for so many processes: files that share a service stay in one, in the order as written."""
    if at_a_time == ONE_BY_ONE:
        return []
    count = ["-n", "logical", "--maxprocesses", "8"] if at_a_time == ALL_PROCESSORS else ["-n", str(at_a_time)]
    return [*count, "--dist", "loadgroup", "--no-loadscope-reorder"]


def command(suite: Suite, marked: str, more: Sequence[str] = ()) -> list[str]:
    """Return the command that runs a suite's tests with these marks; `more` are further words for pytest."""
    ignored = [f"--ignore={path}" if file_of(path) == path else f"--deselect={path}" for path in suite.without]
    python = str(ROOT / suite.environment / "bin" / "python")
    words = [python, "-m", "pytest", "-m", marked, *processes(suite.at_a_time), *ignored, *suite.tests]
    return [*words, *more]


def adopt_orphans() -> None:
    """Become the parent of what children leave behind: else its processor time is nobody's. Linux alone has that."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def run(name: str, words: Sequence[str], limit_s: float | None = None) -> Outcome:
    """Run a command to its end, or stop it and all that is in its session once the limit is over.

    Orphans are waited for all the while, as the first process of a machine does.
    """
    began = time.monotonic()
    try:
        started = subprocess.Popen(words, cwd=ROOT, start_new_session=limit_s is not None)
    except FileNotFoundError as error:  # Of an environment that could not be made.
        print(f"anychip: {error}", file=sys.stderr)
        return Outcome(name, _NOT_THERE, 0, 0)
    used = 0.0
    status: int | None = None

    def stop(number: int, frame: object) -> None:
        nonlocal status
        status = _TIMED_OUT
        os.killpg(started.pid, signal.SIGKILL)

    previous = signal.signal(signal.SIGALRM, stop)
    if limit_s is not None:
        signal.setitimer(signal.ITIMER_REAL, max(limit_s, 0.001))
    try:
        while True:
            pid, code, usage = os.wait4(-1, 0)
            used += usage.ru_utime + usage.ru_stime
            if pid == started.pid:
                break
    except KeyboardInterrupt:
        started.send_signal(signal.SIGINT)
        raise
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    started.returncode = os.waitstatus_to_exitcode(code)
    return Outcome(name, started.returncode if status is None else status, time.monotonic() - began, used + _left())


def _left(patience_s: float = 5) -> float:
    """Return the processor time of orphans that end soon, such as the process that others are forked from."""
    used, end = 0.0, time.monotonic() + patience_s
    while time.monotonic() < end:
        try:
            pid, _, usage = os.wait4(-1, os.WNOHANG)
        except ChildProcessError:
            break
        used += usage.ru_utime + usage.ru_stime
        if not pid:
            time.sleep(0.05)
    return used
