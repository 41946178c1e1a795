"""Threads for work that would block the event loop and releases the interpreter lock, such as large copies.

Owns: the threads. Must not know what the work is. Images are not decoded here: app.decoding has processes for that.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import errno
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

_Result = TypeVar("_Result")


class ThreadsEndedError(RuntimeError):
    """The pool is closed: this work was not done, and will not be."""


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
        """Run `function` in a thread.

        When this ends, in any way, no thread runs `function` and none will: the caller has back what it lent (a slot).
        So work cancelled before it begins never begins, and work cancelled later is waited for. Raises
        ThreadsEndedError once the pool is closed, and what `function` raises.
        """
        try:
            work = self._executor.submit(function, *args)
        except RuntimeError as error:
            raise ThreadsEndedError(str(error)) from None
        try:
            await _ended(work)
        except asyncio.CancelledError:
            work.cancel()
            while not work.done():
                with suppress(asyncio.CancelledError):
                    await _ended(work)
            raise
        try:
            return work.result()
        except concurrent.futures.CancelledError:
            raise ThreadsEndedError("the threads have ended") from None

    async def close(self) -> None:
        """End the threads; drop work that has not begun, and wait for work that has."""
        await asyncio.to_thread(self._executor.shutdown, cancel_futures=True)


async def _ended(work: Future[Any]) -> None:
    """Wait for work to end; unlike asyncio.wrap_future, a cancelled wait does not cancel the work."""
    loop = asyncio.get_running_loop()
    ended = loop.create_future()

    def wake() -> None:
        if not ended.done():
            ended.set_result(None)

    def notify(_: Future[Any]) -> None:
        with suppress(RuntimeError):  # The loop is closed: no task waits any more.
            loop.call_soon_threadsafe(wake)

    work.add_done_callback(notify)
    await ended
