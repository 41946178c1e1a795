"""Services forked from a process that has imported what they need: a start costs no two seconds of imports.

A service imports the same modules that it would import by itself, computes nothing meanwhile, and then runs the command
line as anybody else. What depends on the environment that libraries read when they load has to start a service of its
own (`running` in tests/support/service_process.py does where it is given an environment).
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TextIO

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.support.warm_imports"])

STARTED_WITH: dict[str, str] = {}
"""The environment that services get, as it was before the tests' process loaded libraries that change it."""


def fits(environment: Mapping[str, str]) -> bool:
    """Whether a service with this beside our environment may be forked: only anychip reads these variables."""
    return all(name.startswith("ANYCHIP_") for name in environment)


def _start_server() -> None:
    """Start the process that forks, where there is none, in the environment of a service."""
    changed = dict(os.environ)
    os.environ.clear()
    os.environ.update(STARTED_WITH)
    try:
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(changed)


class WarmProcess:
    """`anychip` with these words, as subprocess.Popen has it: its standard output is a pipe, its errors are a file."""

    def __init__(self, words: Sequence[str], folder: Path, environment: Mapping[str, str], errors: Path) -> None:
        reader, writer = _context.Pipe(duplex=False)
        variables = dict(environment)
        self._process = _context.Process(target=_run, args=(list(words), str(folder), variables, writer, str(errors)))
        _start_server()
        self._process.start()
        writer.close()
        self.stdout: TextIO = os.fdopen(os.dup(reader.fileno()), encoding="utf-8")
        reader.close()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit status, minus the signal that ended it; None while it lives."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """As `returncode`."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """The exit status. Raises subprocess.TimeoutExpired."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired("anychip", timeout)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        """Nothing for a process that has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)


def _run(words: list[str], folder: str, environment: dict[str, str], output: Connection, errors: str) -> None:
    """The service's process, from its first line."""
    os.dup2(output.fileno(), 1)
    output.close()
    with open(errors, "w") as log:
        os.dup2(log.fileno(), 2)
    sys.stdout = open(1, "w", buffering=1, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, encoding="utf-8", closefd=False)  # noqa: SIM115
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.path.insert(0, folder)  # As -m does.
    sys.argv = ["anychip", *words]
    multiprocessing.current_process().name = "MainProcess"
    from app.cli import main

    sys.exit(main(words))
