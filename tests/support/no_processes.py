"""Guard that stops every start of a process while it is armed: tests/unit/conftest.py arms it for its tests."""

from __future__ import annotations

import _posixsubprocess
import os
import sys
from collections.abc import Callable
from typing import Any

EVENTS = {
    "os.exec",
    "os.fork",
    "os.forkpty",
    "os.posix_spawn",
    "os.spawn",
    "os.system",
    "pty.spawn",
    "subprocess.Popen",
}
LINKERS = {"/sbin/ldconfig", "/usr/sbin/ldconfig"}
"""Programs of ctypes.util.find_library, which packages call in their import: chance decides which test comes first."""


class ProcessStartedError(BaseException):
    """Start of a process. Code that catches every Exception does not catch it."""


class Guard:
    """Guard on starts of processes. `tried`: starts stopped while armed; None while not armed: all are allowed."""

    def __init__(self) -> None:
        self.tried: list[str] | None = None
        self._fork_exec: Callable[..., int] = _posixsubprocess.fork_exec
        # multiprocessing and its resource tracker call this function directly, without an audit event.
        _posixsubprocess.fork_exec = self._guarded_fork_exec
        sys.addaudithook(self._hook)

    def _refuse(self, what: str) -> None:
        if self.tried is not None:
            self.tried.append(what)
            raise ProcessStartedError(f"tests/unit starts no process, and this does: {what}")

    def _hook(self, event: str, arguments: tuple[object, ...]) -> None:
        if event in EVENTS and not (event == "subprocess.Popen" and str(arguments[0]) in LINKERS):
            self._refuse(f"{event} {arguments[:2]}")

    def _guarded_fork_exec(self, *arguments: Any) -> int:
        if not arguments[0] or os.fsdecode(arguments[0][0]) not in LINKERS:
            self._refuse(f"multiprocessing {arguments[:1]}")
        return self._fork_exec(*arguments)


GUARD = Guard()
