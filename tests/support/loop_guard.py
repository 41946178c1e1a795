"""What each callback of an event loop costs: the processor's time, and whether it waited for something.

    with guarded() as found:   # asyncio's loops; for uvloop: uvloop.Loop's place takes GuardedUvLoop
        ...
    assert found == []

Neither is time by the clock, so a busy machine changes neither. `time.thread_time` counts only while the thread
computes. A callback that blocks gives its processor up of its own accord: the system counts that (`ru_nvcsw`), also
where others hog all processors; what it waited for a processor (schedstat) is subtracted from how long.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import threading
import time
from asyncio import events
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest

COMPUTED_S = BLOCKED_S = 0.02
"""Beside busy threads of its own process a loop waits 10 ms and more for the interpreter's lock."""
_THREAD = resource.RUSAGE_THREAD


class Held(NamedTuple):
    """A callback that held its loop up: by computing, or by waiting; times in seconds."""

    name: str
    computed_s: float
    blocked_s: float
    wall_s: float


class CallbackGuard:
    """`held`: the callbacks beyond the limits."""

    def __init__(self, computed_s: float = COMPUTED_S, blocked_s: float = BLOCKED_S) -> None:
        self.held: list[Held] = []
        self.callbacks = 0
        self._limits = computed_s, blocked_s
        self._stat = threading.local()

    def run(self, name: Callable[[], str], function: Callable[..., Any], *given: Any) -> Any:
        """Call it, and note what it costs."""
        self.callbacks += 1
        named = name()  # Before it runs: a task is where it waits.
        switches = resource.getrusage(_THREAD).ru_nvcsw
        (idle_s, wall_s), computed_s = self._idle_s(), time.thread_time()
        try:
            return function(*given)
        finally:
            computed_s, blocked_s = time.thread_time() - computed_s, 0.0
            wall_s = time.perf_counter() - wall_s
            # Else the time was a hypervisor's, or another process's.
            if wall_s - computed_s > self._limits[1] and resource.getrusage(_THREAD).ru_nvcsw > switches:
                blocked_s = self._idle_s()[0] - idle_s - computed_s
            if computed_s > self._limits[0] or blocked_s > self._limits[1]:
                self.held.append(Held(named, computed_s, blocked_s, wall_s))

    def close(self) -> None:
        """In the thread of the loop that was watched."""
        os.close(self._stat.__dict__.pop("file"))

    def _idle_s(self) -> tuple[float, float]:
        """The time, less what this thread has waited for a processor so far; and the time. Both of one moment."""
        after = self._waited()
        while True:
            before, now_s, after = after, time.perf_counter(), self._waited()
            if before == after:  # Else it had to wait between the two.
                return now_s - after / 1e9, now_s

    def _waited(self) -> int:
        if not hasattr(self._stat, "file"):
            path = f"/proc/self/task/{threading.get_native_id()}/schedstat"
            self._stat.file = os.open(path, os.O_RDONLY)  # Without it nothing can be said: that is an error.
        return int(os.pread(self._stat.file, 64, 0).split()[1])


def named(callback: Any) -> str:
    """Of a task, its coroutine and the line where it waits."""
    task = getattr(callback, "__self__", None)
    if isinstance(task, asyncio.Task):
        coroutine = task.get_coro()
        frame = getattr(coroutine, "cr_frame", None)
        where = f" at {frame.f_code.co_filename}:{frame.f_lineno}" if frame else ""
        return f"{getattr(coroutine, '__qualname__', coroutine)}{where} ({task.get_name()})"
    function = getattr(callback, "func", callback)
    code = getattr(function, "__code__", None)
    where = f" at {code.co_filename}:{code.co_firstlineno}" if code else ""
    return f"{getattr(function, '__qualname__', function)}{where}"


@contextlib.contextmanager
def guarded(computed_s: float = COMPUTED_S, blocked_s: float = BLOCKED_S) -> Iterator[CallbackGuard]:
    """Watch every callback of asyncio's own loops."""
    guard, run = CallbackGuard(computed_s, blocked_s), events.Handle._run
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(events.Handle, "_run", lambda handle: guard.run(lambda: named(handle._callback), run, handle))
        yield guard
    guard.close()


def guarded_loop(base: type[Any], guard: CallbackGuard) -> type[Any]:
    """A class of loops, such as uvloop's, whose handles cannot be watched: what they are given is."""

    def watched(callback: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *given: guard.run(lambda: named(callback), callback, *given)

    def heard(protocol: Any) -> Any:
        for name in ("data_received", "buffer_updated", "connection_made", "connection_lost", "eof_received"):
            if hasattr(protocol, name):
                setattr(protocol, name, watched(getattr(protocol, name)))
        return protocol

    class Guarded(base):  # type: ignore[misc]
        def call_soon(self, callback: Any, *given: Any, context: Any = None) -> Any:
            return super().call_soon(watched(callback), *given, context=context)

        def call_soon_threadsafe(self, callback: Any, *given: Any, context: Any = None) -> Any:
            return super().call_soon_threadsafe(watched(callback), *given, context=context)

        def call_later(self, delay: float, callback: Any, *given: Any, context: Any = None) -> Any:
            return super().call_later(delay, watched(callback), *given, context=context)

        def call_at(self, when: float, callback: Any, *given: Any, context: Any = None) -> Any:
            return super().call_at(when, watched(callback), *given, context=context)

        def add_reader(self, fd: Any, callback: Any, *given: Any) -> Any:
            return super().add_reader(fd, watched(callback), *given)

        def add_writer(self, fd: Any, callback: Any, *given: Any) -> Any:
            return super().add_writer(fd, watched(callback), *given)

        async def create_server(self, factory: Any, *given: Any, **named_: Any) -> Any:
            return await super().create_server(lambda: heard(factory()), *given, **named_)

        async def connect_accepted_socket(self, factory: Any, *given: Any, **named_: Any) -> Any:
            return await super().connect_accepted_socket(lambda: heard(factory()), *given, **named_)

    return Guarded
