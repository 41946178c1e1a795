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
from typing import NamedTuple

from anychip_base.interpreter import python_command

_START_LIMIT_S = 900.0
_STOP_LIMIT_S = 60.0


class RunningService(NamedTuple):
    """Port and process of a running service."""

    port: int
    process: subprocess.Popen[str]

    @property
    def url(self) -> str:
        """Address of the service, without a slash at the end."""
        return f"http://127.0.0.1:{self.port}"


class ServiceStartError(Exception):
    """Failure of a service to start with these settings; the message is the service's own."""


@contextlib.contextmanager
def serving(options: Sequence[str], *, own_session: bool = True) -> Iterator[RunningService]:
    """Run `anychip serve` with these options; end it and every process it started. Raises ServiceStartError.

    `own_session`: the service leads a process group, which is killed at the end; else it stays in the caller's group.
    """
    command = python_command("-m", "app", "serve", "--port", "0", "--log-level", "error", *options)
    # A file, because a pipe that nobody reads gets full.
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output, contextlib.ExitStack() as ends:
        with _held_back():
            process = subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=output,
                text=True,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
                start_new_session=own_session,
            )
            ends.callback(_end, process, own_session=own_session)
            limit = threading.Timer(_START_LIMIT_S, process.kill)  # Ends the read below, too.
            limit.start()
            ends.callback(limit.cancel)
        assert process.stdout is not None
        found = re.search(r":(\d+)\s*$", process.stdout.readline())
        limit.cancel()
        if not found:
            process.wait(_STOP_LIMIT_S)
            output.seek(0)
            lines = output.read().strip().splitlines() or ["it ended without a word"]
            raise ServiceStartError(lines[-1].removeprefix("anychip: ")[:300])
        yield RunningService(int(found[1]), process)


def _end(process: subprocess.Popen[str], *, own_session: bool) -> None:
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_STOP_LIMIT_S)
    if own_session:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


def run_group(command: Sequence[str], limit_s: float | None = None) -> tuple[int, str, str]:
    """Run a command in a process group of its own; return its status, output and errors.

    At the limit, and where this process is interrupted, the group is killed. Raises TimeoutExpired, with what was said,
    and OSError.
    """
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        printed, errors = process.communicate(timeout=limit_s)
    except BaseException as error:
        os.killpg(process.pid, signal.SIGKILL)
        printed, errors = process.communicate()
        if isinstance(error, subprocess.TimeoutExpired):
            raise subprocess.TimeoutExpired(command, error.timeout, printed, errors) from None
        raise
    return process.returncode, printed, errors


@contextlib.contextmanager
def _on_sigterm(handler: Callable[..., object]) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():  # Signals are the main thread's.
        yield
        return
    before = signal.signal(signal.SIGTERM, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def ended_in_order() -> contextlib.AbstractContextManager[None]:
    """End the command on SIGTERM by an exception, so that its children in sessions of their own end, too."""
    return _on_sigterm(lambda *_: sys.exit(128 + signal.SIGTERM))


@contextlib.contextmanager
def _held_back() -> Iterator[None]:
    """Hold SIGTERM back: its exception would leave a child that has started and that nobody ends yet."""
    received: list[int] = []
    with _on_sigterm(lambda number, _: received.append(number)):
        yield
    if received:
        signal.raise_signal(signal.SIGTERM)
