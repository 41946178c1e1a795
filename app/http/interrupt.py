"""What ends a request from outside while it is being answered: its client leaves.

Owns: cancelling the request's task then, and saying afterwards that this was why. Must not know what the request is
about. Deadlines of uploads are app.ingress.interrupt's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from starlette.types import Receive

from app.errors import ClientLeftError
from app.ingress.interrupt import current_task, uncancel

_Result = TypeVar("_Result")


async def unless_disconnected(receive: Receive, work: Awaitable[_Result], on_leave: Callable[[], None]) -> _Result:
    """The result of `work`; when the client leaves first, `on_leave` is called and `work` cancelled.

    Raises ClientLeftError then. The body must have been read: whatever is received is taken for the end.
    """
    task = current_task()
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
        uncancel(task)
        raise ClientLeftError from None
    finally:
        # Nothing is awaited after this, so that a client who leaves now interrupts nobody.
        watcher.cancel()
