"""Services and commands forked from a process that has imported their modules: a start costs no seconds of imports.

They import the same modules as by themselves, and compute nothing meanwhile. What depends on variables that libraries
read when they load has to start from nothing (`running` in tests/support/service_process.py and `completed` do so).
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, TextIO

from anychip_base import interpreter
from app.processes.fork_server import start as _start

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.support.warm_imports"])

STARTED_WITH: dict[str, str] = {}
"""Environment for services, from before the tests' process loaded libraries that change it."""

ROOT = Path(__file__).parents[2]
_OF_TESTS = {"DEVICE_UNDER_TEST", "DEVICE_TYPE", "PHOTOGRAPHS"}


def fits(environment: Mapping[str, str]) -> bool:
    """Return True if a process with these variables beside ours may be forked: no imported module reads them."""
    return all(
        name.startswith(("ANYCHIP_", "YOLO_")) or name in _OF_TESTS or (name, text) == ("PYTHONPATH", str(ROOT))
        for name, text in environment.items()
    )


_forked = False
"""True if this process was forked from the warm one, and asks that one for its children."""


def _start_server() -> None:
    """Start the process that forks, if there is none, in the environment of a service."""
    if _forked:
        return
    changed = dict(os.environ)
    os.environ.clear()
    os.environ.update(STARTED_WITH)
    try:
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(changed)


class _Forked:
    """Process forked from the warm one, with subprocess.Popen's interface."""

    def __init__(self, target: Callable[..., None], *arguments: object) -> None:
        self._process = _context.Process(target=target, args=arguments)
        _start_server()
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired("python", timeout)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class WarmProcess(_Forked):
    """Python with these words, `-m module …` or `-c code …`. Its standard output is a pipe, its errors are a file."""

    def __init__(self, words: Sequence[str], folder: Path, environment: Mapping[str, str], errors: Path) -> None:
        reader, writer = _context.Pipe(duplex=False)
        super().__init__(_run, list(words), str(folder), dict(environment), writer, str(errors))
        writer.close()
        self.stdout: TextIO = os.fdopen(os.dup(reader.fileno()), encoding="utf-8")
        reader.close()


class WarmScript(_Forked):
    """Result of `python_command` for a file, in its own session, printing into open files: a child of
    models/exports/exported.py or backends/detect.py.
    """

    def __init__(
        self, command: Sequence[str], *, stdout: IO[bytes], stderr: IO[bytes], env: Mapping[str, str], **_: object
    ) -> None:
        files = [f"/proc/{os.getpid()}/fd/{file.fileno()}" for file in (stdout, stderr)]
        super().__init__(_run_script, list(command[1:]), dict(env), files)


_NAMES = ("DEVNULL", "PIPE", "STDOUT", "TimeoutExpired")
SUBPROCESS: Any = SimpleNamespace(Popen=WarmScript, **{name: getattr(subprocess, name) for name in _NAMES})
"""Stand-in for the module subprocess in models.exports.exported and backends.detect: their children need not import
PyTorch.
"""


def _run_script(words: list[str], environment: dict[str, str], files: list[str]) -> None:
    os.setsid()
    for number, file in enumerate(files, 1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_APPEND), number)
    os.environ.clear()
    os.environ.update(environment)
    place = words.index(interpreter._FILE)  # In the words of `python_command` it follows the interpreter's options.
    sys.path[:] = words[place + 1].split("\n")
    del words[: place + 2]
    sys.argv = words
    runpy.run_path(words[0], run_name="__main__")


def _warm_children(words: Sequence[str]) -> None:
    """Fork children of this process, which look at files and devices, from the warm one, too, and so a
    worker that would be a fresh interpreter. Leave out workers whose import of three seconds a test wants.
    """
    from anychip_tools.null import backend as null
    from app.processes import fork_server
    from app.worker import main
    from backends import detect
    from models.exports import exported

    forked = main._forked

    def worker(parent: int, descriptors: Sequence[int]) -> None:
        """Separate the worker from the warm process: it loses the descriptors by which that one is asked."""
        for module in (exported, detect):
            vars(module)["subprocess"] = subprocess
        del vars(forkserver._forkserver)["ensure_running"]
        forked(parent, descriptors)

    def fresh(parent: int, descriptors: Sequence[int]) -> None:
        """Take the time that the null device's package would take to import, once the worker knows how long."""
        libraries = main.import_libraries

        def slowly() -> None:
            libraries()
            null._import()

        vars(main)["import_libraries"] = slowly
        worker(parent, descriptors)

    global _forked  # noqa: PLW0603
    _forked = True
    vars(forkserver._forkserver)["ensure_running"] = lambda: None  # It knows its address, and is not our child.
    vars(exported)["subprocess"] = vars(detect)["subprocess"] = SUBPROCESS
    vars(main)["_forked"] = worker
    vars(fork_server)["start"] = _start_fork_servers
    if not any("import_ms=3000" in word for word in words):
        vars(main)["_fresh"] = fresh


def _start_fork_servers(command: Sequence[str], environment: Mapping[str, str], *ends: socket.socket) -> int:
    """Stand in for `start` of app/processes/fork_server.py: fork the interpreter of several fork servers from here."""
    from app.processes import forking

    words = command[list(command).index(interpreter._FILE) + 2 :]
    if len(ends) == 1:
        return _start(command, environment, *ends)
    if pid := os.fork():
        return pid
    signal.set_wakeup_fd(-1)
    kept = {0, 1, 2, *(each.fileno() for each in ends)}
    for descriptor in {int(name) for name in os.listdir("/proc/self/fd")} - kept:
        with contextlib.suppress(OSError):  # The descriptor that listed them is closed already.
            os.close(descriptor)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["-c", *words[2:]]
    return forking.end_with(forking.run_spawned)


def _run(words: list[str], folder: str, environment: dict[str, str], output: Connection, errors: str) -> None:
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
    multiprocessing.current_process().name = "MainProcess"
    _warm_children(words)
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = ["-c", *words[2:]]
        exec(words[1], {"__name__": "__main__"})


def completed(
    folder: Path, *words: str, environment: Mapping[str, str] | None = None, timeout_s: float = 280
) -> subprocess.CompletedProcess[str]:
    """Run Python with these words in `folder` to its end; fork it if its environment allows that.

    Raises subprocess.TimeoutExpired, and ends it then.
    """
    beside = {"PYTHONPATH": str(ROOT), **(environment or {})}
    inherited = {name: text for name, text in os.environ.items() if name.startswith("ANYCHIP_")}
    variables = {**STARTED_WITH, **inherited, **beside}
    if not fits(beside) or words[0] not in ("-m", "-c"):
        command = [sys.executable, *words]
        return subprocess.run(
            command, cwd=folder, env=variables, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    with tempfile.NamedTemporaryFile("r", encoding="utf-8") as errors:
        process = WarmProcess(words, folder, variables, Path(errors.name))
        ending = threading.Timer(timeout_s, process.kill)
        ending.start()
        try:
            printed = process.stdout.read()
            code = process.wait()
        finally:
            ending.cancel()
            process.stdout.close()
        if code == -signal.SIGKILL:
            raise subprocess.TimeoutExpired(list(words), timeout_s, printed, errors.read())
        return subprocess.CompletedProcess(list(words), code, printed, errors.read())
