"""Threads for work that would block the event loop and releases the interpreter lock, such as large copies.

Owns: the threads. Must not know what the work is. Images are not decoded here: app.decoding has processes for that.
"""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

_Result = TypeVar("_Result")


def begun(count: int, name: str) -> ThreadPoolExecutor:
    """Return a pool whose threads all run, before there is work.

    An ordinary pool starts a thread for work that finds none idle, and the caller waits until it runs: an event loop
    was blocked for 0.1 to 0.4 s by that, while other processes kept the processors busy.

    Raises OSError if the threads are not permitted; none is left then.
    """
    executor, together = ThreadPoolExecutor(count, thread_name_prefix=name), threading.Barrier(count)
    try:
        for _ in range(count):
            executor.submit(together.wait)
    except RuntimeError as error:
        together.abort()  # Else those that have begun wait for the others for ever, and with them the process's end.
        executor.shutdown(wait=False, cancel_futures=True)
        reason = "no further thread may begin: processes and threads are limited (ulimit -u, pids of a container)"
        raise OSError(errno.EAGAIN, reason) from error
    return executor


class Threads:
    """Thread pool of one event loop. Work is taken in order."""

    def __init__(self, count: int) -> None:
        self._executor = begun(count, "offload")

    async def run(self, function: Callable[..., _Result], *args: Any) -> _Result:
        """Run `function` in a thread; here once the pool is closed: only answers that somebody waits for are left then.

        When this ends, in any way, no thread runs `function` and none will: the caller has back what it lent (a slot).
        So work cancelled before it begins never begins, and work cancelled later is waited for. Raises what `function`
        raises.
        """
        try:
            work = self._executor.submit(function, *args)
        except RuntimeError:
            return function(*args)
        ended = asyncio.wrap_future(work)
        try:
            await asyncio.wait((ended,))  # It never cancels what it waits for.
        except asyncio.CancelledError:
            work.cancel()
            while not ended.done():
                with suppress(asyncio.CancelledError):
                    await asyncio.wait((ended,))
            if not ended.cancelled():
                ended.exception()  # Nobody asks for it any more.
            raise
        return function(*args) if ended.cancelled() else ended.result()

    async def close(self) -> None:
        """End the threads; wait for work that they have begun."""
        await asyncio.to_thread(self._executor.shutdown, cancel_futures=True)
