"""The unit room starts no process: a test that tries to is stopped, and fails also where its refusal is caught."""

from __future__ import annotations

import _posixsubprocess
import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support.virtual_time import VirtualLoop, as_clock

ROOM = Path(__file__).parent
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


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """From the first fixture of a test to the last, those of a module included.

    pytest calls this hook for the tests of every room once one of this room has been collected.
    """
    if not item.path.is_relative_to(ROOM):
        return (yield)
    GUARD.tried = []
    try:
        return (yield)
    finally:
        GUARD.tried = None


@pytest.fixture(autouse=True)
def stopped_starts() -> Iterator[list[str]]:
    """Return the starts of processes that the guard has stopped: a test fails that leaves any."""
    assert GUARD.tried is not None
    yield GUARD.tried
    assert not GUARD.tried


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Return a loop in virtual time for tests with the `virtual_time` fixture, else one of asyncio's."""
    is_virtual = "virtual_time" in getattr(item, "fixturenames", ())
    return {"loop": VirtualLoop if is_virtual else asyncio.new_event_loop}


@pytest.fixture
async def virtual_time() -> AsyncIterator[None]:
    """Put the test's loop and the app's clock into virtual time."""
    with as_clock(asyncio.get_running_loop()):
        yield
