"""Children of commands, which end with them: a service on a free port, a compiler, another command."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from anychip_base.interpreter import python_command

_START_LIMIT_S = 900.0
_STOP_LIMIT_S = 60.0


class ServiceStartError(Exception):
    """Failure of a service to start with these settings; the message is the service's own."""


@contextlib.contextmanager
def serving(options: Sequence[str], *, own_session: bool = True) -> Iterator[tuple[int, subprocess.Popen[str]]]:
    """Run `anychip serve` with these options; end it and every process it started. Raises ServiceStartError.

    Yields its port and its process. `own_session`: it leads a process group, which is killed at the end; else it stays
    in the caller's group.
    """
    command = python_command("-m", "app", "serve", "--port", "0", "--log-level", "error", *options)
    # A file, because a pipe that nobody reads gets full.
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output,
        _started(
            command,
            lambda process: _end(process, own_session=own_session),
            stderr=output,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            start_new_session=own_session,
        ) as process,
    ):
        limit = threading.Timer(_START_LIMIT_S, process.kill)  # Ends the read below, too.
        try:
            limit.start()
            assert process.stdout is not None
            found = re.search(r":(\d+)\s*$", process.stdout.readline())
        finally:
            limit.cancel()
        if not found:
            process.wait(_STOP_LIMIT_S)
            output.seek(0)
            lines = output.read().strip().splitlines() or ["it ended without a word"]
            raise ServiceStartError(lines[-1].removeprefix("anychip: ")[:300])
        yield int(found[1]), process


def _end(process: subprocess.Popen[str], *, own_session: bool) -> None:
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_STOP_LIMIT_S)
    if own_session:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.wait()


def run_group(command: Sequence[str], limit_s: float | None = None) -> tuple[int, str, str]:
    """Run a command in a process group of its own; return its status, output and errors.

    At the limit, and where this process is interrupted, the group is killed. Raises TimeoutExpired, with what was said,
    and OSError.
    """
    with _started(
        command,
        _kill_group,
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        errors="replace",
        start_new_session=True,
    ) as process:
        try:
            printed, errors = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired as late:
            _kill_group(process)
            raise subprocess.TimeoutExpired(command, late.timeout, *process.communicate()) from None
    return process.returncode, printed, errors


def _kill_group(process: subprocess.Popen[str]) -> None:
    if process.returncode is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextlib.contextmanager
def _started(
    command: Sequence[str], end: Callable[[subprocess.Popen[str]], None], **options: Any
) -> Iterator[subprocess.Popen[str]]:
    """Run a command until `end` ends it, also for SIGTERM or SIGINT, which are held back while it starts."""
    received: list[int] = []

    def hold(number: int, _: object) -> None:
        received.append(number)

    with ended_in_order(), contextlib.ExitStack() as ends:
        with _on_signal(signal.SIGINT, hold), _on_signal(signal.SIGTERM, hold):
            process = ends.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **options))
            ends.callback(end, process)
        for number in received:
            signal.raise_signal(number)
        yield process


@contextlib.contextmanager
def _on_signal(number: int, handler: Callable[..., object]) -> Iterator[None]:
    # Signals are the main thread's. One that is ignored stays so, in the child, too.
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(number) is signal.SIG_IGN:
        yield
        return
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


def ended_in_order() -> contextlib.AbstractContextManager[None]:
    """End the command on SIGTERM by an exception, so that its children in sessions of their own end, too."""
    return _on_signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
