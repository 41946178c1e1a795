"""Vendors' command-line tools, run harmlessly, and the last known telemetry of each device, read away from requests.

Must not know what the output means, or any vendor.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from math import isfinite, nan
from pathlib import Path

from backends.contract.backend import Telemetry

log = logging.getLogger(__name__)

_OUTPUT_BYTES = 1 << 20
_SELDOM_S = 60.0
_ALSO_THERE = f"{os.pathsep}/opt/hyhal/bin"  # Hygon's images have hy-smi there and not on PATH.
_CLOSE_LIMIT_S = 5.0
_MOST_WATTS = 1e6  # More is a tool's mistake


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
        """Return the command's output of the last minute, "" if it fails."""
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
    with contextlib.suppress(ProcessLookupError, PermissionError):  # Nothing of the group is left.
        os.killpg(process.pid, signal.SIGKILL)


class Energy:
    """Energy from power: the trapezium between two known samples. It never falls, and bridges no gap."""

    def __init__(self) -> None:
        self._joules = nan
        self._last: tuple[float, float] | None = None

    def add(self, now_s: float, watts: float) -> float:
        """Add a sample; return the joules since the first known power, NaN before it."""
        if not 0 <= watts <= _MOST_WATTS:  # NaN too
            self._last = None
            return self._joules
        if self._last is None:
            self._joules = self._joules if isfinite(self._joules) else 0.0
        else:
            then_s, then_watts = self._last
            self._joules += max(0.0, now_s - then_s) * (then_watts + watts) / 2
        self._last = (now_s, watts)
        return self._joules


class Sampler:
    """Sampler that calls `read` every `interval_s` in its own thread, which the first `latest` starts.

    `read(tool)` -> Telemetry by device index; as `wanted` it may take the devices that callers have asked for. It may
    raise: then all but the energy is unknown until it succeeds again, and the log says so once. Without an energy
    counter, energy is integrated from power over `clock` (seconds). `close` closes the tool, which ends a running
    `read` soon.
    """

    def __init__(
        self,
        read: Callable[..., Mapping[int, Telemetry]],
        tool: Tool,
        interval_s: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._asked: set[int] = set()
        self._read, self._tool = read, tool
        self._takes_wanted = "wanted" in inspect.signature(read).parameters
        self._interval_s = interval_s
        self._clock = clock
        self._samples: Mapping[int, Telemetry] = {}
        self._energy: dict[int, Energy] = {}
        self._counters: set[int] = set()  # Devices that count their energy themselves: it is never integrated
        self._failing = False
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def latest(self, index: int) -> Telemetry:
        """Return a device's last sample, at once; NaN before the first, and for an unknown device."""
        self._asked.add(index)
        if self._thread is None:
            self._start()
        return self._samples.get(index, Telemetry())

    def sample(self) -> None:
        """Read once, now, in this thread. Cannot raise. The thread does this; tests may."""
        try:
            wanted = {"wanted": tuple(self._asked)} if self._takes_wanted else {}
            read = dict(self._read(self._tool, **wanted))
            self._failing = False
        except Exception as error:  # A vendor's library may raise anything
            if not self._failing and not self._stop.is_set():
                log.warning("no telemetry until this is mended: %s", error)
            self._failing = True
            read = {}
        now_s = self._clock()
        samples = {}
        self._counters |= {index for index, given in read.items() if isfinite(given.energy_joules)}
        for index in {*read, *self._energy}:
            given = read.get(index, Telemetry())
            joules = self._energy.setdefault(index, Energy()).add(now_s, given.power_watts)
            samples[index] = given if index in self._counters else replace(given, energy_joules=joules)
        self._samples = samples

    def close(self) -> None:
        """End the thread, and cancel its read. Idempotent; the last sample stays."""
        self._stop.set()
        self._tool.close()
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join(_CLOSE_LIMIT_S)

    def _start(self) -> None:
        with self._lock:
            if self._thread is None and not self._stop.is_set():
                self._thread = threading.Thread(target=self._run, name="telemetry", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        self.sample()
        while not self._stop.wait(self._interval_s):
            self.sample()
