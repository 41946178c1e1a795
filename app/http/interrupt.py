"""What ends a request from outside while it is being served: its client leaves, its deadline passes.

Owns: cancelling the request's task for one of these reasons, and saying afterwards which it was. Must not know what the
request is about.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Receive

from app.errors import ServiceError

_Result = TypeVar("_Result")


class interrupted_at:  # noqa: N801 - reads as what it is: with interrupted_at(deadline_s)
    """Cancel what runs inside at `deadline_s` (`time.monotonic()`). Raises DEADLINE_EXCEEDED then."""

    def __init__(self, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._fired = False

    def __enter__(self) -> None:
        self._task = _current_task()
        left_s = max(0.0, self._deadline_s - time.monotonic())
        self._timer = asyncio.get_running_loop().call_later(left_s, self._fire)

    def _fire(self) -> None:
        self._fired = True
        self._task.cancel()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        if self._fired and kind is asyncio.CancelledError:
            _uncancel(self._task)
            raise ServiceError("DEADLINE_EXCEEDED", "the deadline passed before the body had arrived") from None


async def unless_disconnected(receive: Receive, work: Awaitable[_Result], on_leave: Callable[[], None]) -> _Result:
    """The result of `work`; when the client leaves first, `on_leave` is called and `work` cancelled.

    Raises starlette's ClientDisconnect then. The body must have been read: whatever is received is taken for the end.
    """
    task = _current_task()
    left = False

    async def watch() -> None:
        nonlocal left
        while (await receive())["type"] != "http.disconnect":
            pass
        left = True
        on_leave()
        task.cancel()

    watcher = asyncio.ensure_future(watch())
    try:
        return await work
    except asyncio.CancelledError:
        if not left:
            raise
        _uncancel(task)
        raise ClientDisconnect from None
    finally:
        # Nothing is awaited after this, so that a client who leaves now interrupts nobody.
        watcher.cancel()


def _current_task() -> asyncio.Task[Any]:
    task = asyncio.current_task()
    assert task is not None
    return task


def _uncancel(task: asyncio.Task[Any]) -> None:
    if hasattr(task, "uncancel"):  # Since Python 3.11 a task counts who cancelled it.
        task.uncancel()
