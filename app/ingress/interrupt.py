"""Interruptions of a request: its deadline, a slow body, a client that leaves, a shutdown.

Owns: cancelling the request's task for one of these reasons, and the error for it afterwards. Must not know what the
request is about.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeVar

from app import clock
from app.errors import ServiceError

_FREE_S = 5.0  # An upload may take this long at any rate.
_STOOD_STILL_S = 0.25
"""Lateness of a timer that shows that this process was stopped: bytes that arrived meanwhile are read first."""


_Interruption = TypeVar("_Interruption", bound="Interruption")


class Interruption:
    """Context within which its task may be interrupted, with a reason; `among` holds it for as long."""

    __slots__ = ("_among", "_reason", "task")

    def __init__(self, task: asyncio.Task[Any] | None = None, among: set[Interruption] | None = None) -> None:
        """Take `task`, the running one, from the caller: before Python 3.12 finding it costs a system call."""
        self.task = task or _running()
        self._among = among
        self._reason: Exception | None = None

    def __enter__(self: _Interruption) -> _Interruption:
        if self._among is not None:
            self._among.add(self)
        return self

    def interrupt(self, reason: Exception) -> None:
        """Cancel the task inside; the context then raises `reason`."""
        self._reason = reason
        self.task.cancel()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._among is not None:
            self._among.discard(self)
        if self._reason is not None and kind is asyncio.CancelledError:
            taken_back(self.task)
            raise self._reason from None


def taken_back(task: asyncio.Task[Any]) -> None:
    """Take back the cancellation of a task that was only an interruption: the task goes on."""
    if hasattr(task, "uncancel"):  # Since Python 3.11 a task counts its cancellations.
        task.uncancel()


def _running() -> asyncio.Task[Any]:
    task = asyncio.current_task()
    assert task is not None
    return task


class interrupted_at(Interruption):  # noqa: N801 - reads as what it is: with interrupted_at(deadline_s)
    """Context that cancels its task at `deadline_s` (`time.monotonic()`), and then raises DEADLINE_EXCEEDED.

    It raises REQUEST_TIMEOUT earlier if a body that has begun to arrive is slower than `least_bytes_per_s`, if that is
    set. (Nothing is held for a body that has not begun.)
    """

    __slots__ = ("_began_s", "_deadline_s", "_due_s", "_timer", "least_bytes_per_s")

    def __init__(self, deadline_s: float, task: asyncio.Task[Any] | None = None) -> None:
        super().__init__(task)
        self._deadline_s = deadline_s
        self.least_bytes_per_s = 0

    def __enter__(self) -> interrupted_at:
        self._began_s = clock.monotonic()
        # Mostly all is there: a timer is only set for what still waits after this turn of the loop.
        self._timer: asyncio.Handle = self.task.get_loop().call_soon(self._arm_deadline)
        return self

    def arrived(self, size: int) -> None:
        """Note that so many bytes of the body have arrived, and more will come."""
        if self.least_bytes_per_s:
            self._timer.cancel()
            self._arm_rate(self._began_s + _FREE_S + size / self.least_bytes_per_s)

    def arrived_wholly(self) -> None:
        """Note that the whole body has arrived."""
        self._timer.cancel()
        self._arm_deadline()

    def _arm_deadline(self) -> None:
        self._arm(self._deadline_s, self._too_late)

    def _arm_rate(self, due_s: float) -> None:
        self._due_s = max(due_s, clock.monotonic())  # A body that is too slow already is not late.
        self._arm(min(due_s, self._deadline_s), self._too_slow if due_s < self._deadline_s else self._too_late)

    def _arm(self, at_s: float, function: Callable[[], None]) -> None:
        self._timer = self.task.get_loop().call_later(max(0.0, at_s - clock.monotonic()), function)

    def _too_late(self) -> None:
        self.interrupt(ServiceError("DEADLINE_EXCEEDED", "the deadline passed before the body had arrived"))

    def _too_slow(self) -> None:
        now_s = clock.monotonic()
        if now_s - self._due_s > _STOOD_STILL_S:
            self._arm_rate(now_s + _FREE_S)
            return
        self.interrupt(ServiceError("REQUEST_TIMEOUT", "the body comes too slowly"))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        if self._reason is not None:
            super().__exit__(kind, error, trace)


async def ended_before(task: asyncio.Future[Any], hurry: asyncio.Event) -> bool:
    """Wait for a task to end, until there is a hurry; return True if it has ended. It is not cancelled."""
    hurried = asyncio.ensure_future(hurry.wait())
    try:
        await asyncio.wait((task, hurried), return_when=asyncio.FIRST_COMPLETED)
    finally:
        hurried.cancel()
    return task.done()
