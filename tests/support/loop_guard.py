"""Guard of an event loop: it finds callbacks that compute for too long, or wait in a call.

    with guarded() as guard:    # The running loop, asyncio's own.
        ...                     # Fails at the end if a callback held the loop up.

In a service the runner of tests/support/constants.py sets the guard, on uvloop's loop too. It writes a line of a file
for each callback that held the loop up (`answering` in tests/support/liveness.py reads them). A busy machine changes
neither of the two measures:

- Computation is the processor's time of the callback's thread, counted in turns of an empty loop of Python, which the
  same thread runs right after it: a slow processor, or a busy sibling, makes both slow.
- A callback that waits in a call gives its processor up by itself: the system counts that (`ru_nvcsw`). The wait is the
  time by the clock without the computation and without the wait for a processor. One switch interval of a wait for the
  interpreter's lock does not count, as the lock's holder may have no processor. A thread that only sleeps tells when
  any thread could run at all: a hypervisor takes the processors from all.

Limits: a loop of many short waits is not seen, nor a thread that holds the interpreter's lock for long, nor a protocol
that a transport of uvloop gets later. Without schedstat in the kernel only computation counts (`BLOCKED_IS_SEEN`).
"""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import functools
import gc
import itertools
import json
import os
import resource
import signal
import sys
import threading
import time
from asyncio import events
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple
from unittest import mock

COMPUTED_TURNS = 5_000_000
"""Limit of turns: half a second if ten million turns take one, 90 ms on a server's processor of 2024. A service's own
work takes up to a sixth of that (`NOTED` shows it); work that grows with a request, like a document of 19 MB that is
read in the loop, takes several times as much.
"""
GRPC_TURNS = 20_000_000
"""Limit of turns of a callback of gRPC's library, which copies each message in the loop: 18 MB take up to 6,200,000."""
_OF_GRPC = "grpc/_cython/_cygrpc/aio/"
BLOCKED_S = 1.0
"""Limit of a wait. A callback waits for a disk, and for a thread that holds the interpreter's lock without a processor:
for 0.13 to 0.24 s beside programs that hog the processors. A wait for a client or a worker has no such bound.
"""
NOTED = 0.2
"""Share of the limits from which a guard in a service writes a callback down, to show what comes near."""
_TURNS = 5_000
_THREAD = resource.RUSAGE_THREAD
_WITNESS_S = 0.01


def _stat_path() -> str:
    return f"/proc/self/task/{threading.get_native_id()}/schedstat"


BLOCKED_IS_SEEN = os.path.exists(_stat_path())


class Held(NamedTuple):
    """Callback that held its loop up, with begin and end (`time.perf_counter`, the same in all processes)."""

    name: str
    turns: int
    computed_s: float
    blocked_s: float
    began_s: float
    ended_s: float

    def __str__(self) -> str:
        times = f"{1e3 * self.computed_s:.0f} ms, {self.turns:,} turns computed, {1e3 * self.blocked_s:.0f} ms blocked"
        return f"{self.name}: {times}"


class CallbackGuard:
    """Guard that measures each callback that runs in it. `note` gets those beyond the limits."""

    def __init__(
        self, note: Callable[[Held], None], computed_turns: int = COMPUTED_TURNS, blocked_s: float = BLOCKED_S
    ) -> None:
        self._note = note
        self._limits = computed_turns, blocked_s
        self._turn_s = turn_s()
        # Longer callbacks get a closer look, which itself takes a millisecond.
        self._look_s = computed_turns * self._turn_s / 3, blocked_s / 3
        self._continued_s = 0.0
        self._switch_s = sys.getswitchinterval()
        self._stat: int | None = None
        os.register_at_fork(after_in_child=self._forget)

    def hear_of_stops(self) -> None:
        """Discount stops (SIGSTOP), which are no fault of the process; call it in the main thread."""
        signal.signal(signal.SIGCONT, self._continued)

    def run(self, callback: Any, function: Callable[..., Any], *given: Any) -> Any:
        """Call the function and measure its cost. `callback`: gives the name."""
        place = _place(callback)  # Before it runs: a task's place is the line where it waits.
        switches = resource.getrusage(_THREAD).ru_nvcsw
        (idle_s, began_s), computed_s = self._idle_s(), time.thread_time()
        try:
            return function(*given)
        finally:
            computed_s = time.thread_time() - computed_s
            ended_s = time.perf_counter()
            rest_s, blocked_s = ended_s - began_s - computed_s, 0.0
            if rest_s > self._look_s[1] and BLOCKED_IS_SEEN and self._continued_s < began_s:
                switches = resource.getrusage(_THREAD).ru_nvcsw - switches
                if switches:  # Else a hypervisor or another process took the time.
                    blocked_s = self._idle_s()[0] - idle_s - computed_s - (switches - 1) * self._switch_s
            if blocked_s > self._limits[1]:
                time.sleep(0.1)  # Another thread may have been given the SIGCONT, and its handler is late.
                blocked_s *= self._continued_s < began_s
            turns = int(computed_s / max(self._turn_s, turn_s())) if computed_s > self._look_s[0] else 0
            if turns > self._limits[0] or blocked_s > self._limits[1]:
                self._note(Held(_named(callback, place), turns, computed_s, blocked_s, began_s, ended_s))

    def close(self) -> None:
        if self._stat is not None:
            os.close(self._stat)
            self._stat = None

    def _continued(self, number: int, frame: FrameType | None) -> None:
        self._continued_s = time.perf_counter()

    def _forget(self) -> None:
        self._stat = None

    def _idle_s(self) -> tuple[float, float]:
        """Return the time, less this thread's waits for a processor so far; and the time. Both of one moment."""
        after = self._waited()
        while True:
            before, now_s, after = after, time.perf_counter(), self._waited()
            if before == after:  # Else it had to wait between the two.
                return now_s - after / 1e9, now_s

    def _waited(self) -> int:
        if not BLOCKED_IS_SEEN:
            return 0
        if self._stat is None:
            self._stat = os.open(_stat_path(), os.O_RDONLY)
        return int(os.pread(self._stat, 64, 0).split()[1])


def turn_s() -> float:
    """Return the cost of a turn of an empty loop in this thread, in seconds of a processor: the least of several
    looks, as another thread of the same core makes some of them twice as long.
    """
    taken_s = []
    for _ in range(7):
        began_s = time.thread_time()
        for _ in range(_TURNS):
            pass
        taken_s.append(time.thread_time() - began_s)
    return min(taken_s) / _TURNS


def _places(callback: Any) -> Iterator[tuple[CodeType, int]]:
    """Yield, for a task, where each of its coroutines waits for the next one."""
    task = getattr(callback, "__self__", None)
    waiting = task.get_coro() if isinstance(task, asyncio.Task) else None
    while waiting is not None:
        frame = getattr(waiting, "cr_frame", None) or getattr(waiting, "gi_frame", None)
        if frame is None:
            break
        yield frame.f_code, frame.f_lineno
        waiting = getattr(waiting, "cr_await", None) or getattr(waiting, "gi_yieldfrom", None)


def _place(callback: Any) -> tuple[CodeType, int] | None:
    """Return, for a task, the line where it waits."""
    place = None
    for place in _places(callback):  # noqa: B007
        pass
    return place


def _named(callback: Any, place: tuple[CodeType, int] | None) -> str:
    """Name a callback; a task by its coroutine, the line where it ran from, and the lines where it waits now."""
    task = getattr(callback, "__self__", None)
    if isinstance(task, asyncio.Task):
        coroutine, now = task.get_coro(), list(_places(callback))
        name = f"{getattr(coroutine, '__qualname__', coroutine)} ({task.get_name()})"
        began = f" from {_line(*place)}" if place else ""
        return f"{name}{began} to {' > '.join(_line(*at) for at in now) or 'its end'}"
    function = getattr(callback, "func", callback)
    code = getattr(function, "__code__", None)
    name = getattr(function, "__qualname__", str(function))
    return f"{name} at {_line(code, code.co_firstlineno)}" if code else name


def _line(code: CodeType, number: int) -> str:
    return f"{getattr(code, 'co_qualname', code.co_name)} {code.co_filename}:{number}"


class Witness:
    """Thread that sleeps and wakes: a clock that stands still if no thread can run. A context manager."""

    def __init__(self) -> None:
        self._woke_s: list[float] = []
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, name="witness", daemon=True)

    def __enter__(self) -> Witness:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()

    def passed_s(self, began_s: float, ended_s: float) -> float:
        first = max(bisect.bisect_left(self._woke_s, began_s) - 1, 0)
        woke_s = self._woke_s[first : bisect.bisect_right(self._woke_s, ended_s) + 1]
        gaps_s = (min(after, ended_s) - max(before, began_s) for before, after in itertools.pairwise(woke_s))
        return sum(min(gap_s, 4 * _WITNESS_S) for gap_s in gaps_s)

    def confirmed(
        self, held: Iterable[Held], computed_turns: int = COMPUTED_TURNS, blocked_s: float = BLOCKED_S
    ) -> list[Held]:
        """Return those that computed too long, or waited too long while time passed for the witness."""
        found = []
        for each in held:
            limit = GRPC_TURNS if _OF_GRPC in each.name else computed_turns
            waited_s = min(each.blocked_s, self.passed_s(each.began_s, each.ended_s))
            if each.turns > limit or waited_s > blocked_s:
                found.append(each._replace(blocked_s=waited_s))
        return found

    def _run(self) -> None:
        while not self._ends.is_set():
            self._woke_s.append(time.perf_counter())
            time.sleep(_WITNESS_S)
        self._woke_s.append(time.perf_counter())


def told(held: Iterable[Held]) -> str:
    return "the event loop was held up:\n" + "\n".join(map(str, held))


@contextlib.contextmanager
def looked_at(computed_turns: int = COMPUTED_TURNS, blocked_s: float = BLOCKED_S) -> Iterator[list[Held]]:
    """Watch every callback of asyncio's own loops; at the end the list holds those that held one up."""
    found: list[Held] = []
    guard, run = CallbackGuard(found.append, computed_turns, blocked_s), events.Handle._run
    # Like the ready service: a collection that walks over all of PyTorch is no fault of the code under test.
    gc.collect()
    gc.freeze()
    try:
        # A service has no pytest.
        watched = mock.patch.object(events.Handle, "_run", lambda handle: guard.run(handle._callback, run, handle))
        with watched, Witness() as witness:
            yield found
    finally:
        gc.unfreeze()
        guard.close()
    found[:] = witness.confirmed(found, computed_turns, blocked_s)


@contextlib.contextmanager
def guarded() -> Iterator[None]:
    """Fail at the end of the block if a callback of asyncio's own loops held its loop up."""
    with looked_at() as held:
        yield
    assert not held, told(held)


def guarded_loop(base: type[Any], guard: CallbackGuard) -> type[Any]:
    """Make a class of loops, such as uvloop's, whose handles cannot be watched: it watches their callbacks."""

    def watched(callback: Callable[..., Any]) -> Callable[..., Any]:
        return functools.partial(guard.run, callback, callback)

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


def install(file: Path) -> None:
    """Guard every loop that asyncio or uvloop runs in this process and its forks. `file`: for `written`.

    Each line is written when the callback ends: a process that is killed has written all.
    """

    def write(*found: Held) -> None:
        with file.open("a", encoding="utf-8") as out:
            out.writelines(json.dumps(each) + "\n" for each in found)

    write()  # The file says that there is a guard.
    guard, run = CallbackGuard(write, int(NOTED * COMPUTED_TURNS), NOTED * BLOCKED_S), events.Handle._run
    guard.hear_of_stops()
    vars(events)["Handle"]._run = lambda handle: guard.run(handle._callback, run, handle)
    with contextlib.suppress(ImportError):
        import uvloop

        uvloop.run = functools.partial(uvloop.run, loop_factory=guarded_loop(uvloop.Loop, guard))


def written(file: Path) -> list[Held]:
    """Read the guards' records so far. Raises FileNotFoundError if there is no guard."""
    return [Held(*json.loads(line)) for line in file.read_text(encoding="utf-8").splitlines()]
