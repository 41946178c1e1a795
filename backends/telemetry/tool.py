"""Harmless runs of a vendor's command-line tool.

Owns: the processes it starts, their time limit and their working directory. Must not know what the output means.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

_OUTPUT_BYTES = 1 << 20
_SELDOM_S = 60.0
_ALSO_THERE = f"{os.pathsep}/opt/hyhal/bin"  # Hygon's images have hy-smi there and not on PATH.


class ToolError(Exception):
    """The tool is missing, failed or did not end in time; the message is one plain sentence."""


class Tool:
    """Runner of a tool in a temporary directory, since some write where they stand, for at most `limit_s` a run."""

    def __init__(self, limit_s: float = 10.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit_s = limit_s
        self._clock = clock
        self._seldom: dict[tuple[str, ...], tuple[float, str]] = {}
        self.kept: list[tuple[int, int, int]] = []
        """Results that a reader need not ask for again."""
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False

    def run(self, *command: str, output_file: str | None = None) -> str:
        """Run a command; return its output or its `output_file`, at most 1 MiB, undecodable bytes replaced.

        Raises ToolError. One run at a time. Output goes to a file, not a pipe: a child that outlives a killed tool
        would keep a pipe open.
        """
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
            printed = Path(directory, ".printed")
            with printed.open("wb") as stdout:
                process = self._start(command, directory, stdout.fileno())
                try:
                    code = process.wait(self._limit_s)
                except subprocess.TimeoutExpired:
                    raise ToolError(f"{command[0]} did not end within {self._limit_s:g} s.") from None
                finally:
                    self._end(process)
            if code:
                raise ToolError(f"{command[0]} ended with code {code}.")
            try:
                with (Path(directory, output_file) if output_file else printed).open("rb") as file:
                    return file.read(_OUTPUT_BYTES).decode("utf-8", "replace")
            except OSError as error:
                raise ToolError(f"{command[0]} wrote no {output_file or 'output'}: {error}.") from error

    def run_seldom(self, *command: str) -> str:
        """Return the command's output of the last minute; "" if it fails.

        This is for slow figures, and for options that not every version of a tool knows.
        """
        ran_s, printed = self._seldom.get(command, (-_SELDOM_S, ""))
        if self._clock() - ran_s >= _SELDOM_S:
            try:
                printed = self.run(*command)
            except ToolError:
                printed = ""
            self._seldom[command] = (self._clock(), printed)
        return printed

    def close(self) -> None:
        """Kill the running command; nothing starts any more. Idempotent, from any thread."""
        with self._lock:
            self._closed = True
            if self._process is not None:
                _kill(self._process)

    def _start(self, command: tuple[str, ...], directory: str, stdout: int) -> subprocess.Popen[bytes]:
        with self._lock:
            if self._closed:
                raise ToolError(f"{command[0]} is not run any more.")
            try:
                self._process = subprocess.Popen(
                    command,
                    cwd=directory,
                    stdin=subprocess.DEVNULL,
                    stdout=stdout,
                    stderr=subprocess.DEVNULL,
                    env={**os.environ, "LC_ALL": "C", "PATH": os.environ.get("PATH", os.defpath) + _ALSO_THERE},
                    start_new_session=True,
                )
            except OSError as error:
                raise ToolError(f"{command[0]} cannot be run: {error.strerror or error}.") from error
            return self._process

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        with self._lock:
            _kill(process)
            self._process = None
        process.wait()


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill the tool and its children."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # Nothing of the group is left.
        os.killpg(process.pid, signal.SIGKILL)
