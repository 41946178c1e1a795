"""Places that always have a child process, or are about to have one: how a child starts, is watched, ends, is replaced.

    STARTING ──► READY ──► RETIRING ──► ENDING ──► ENDED ──► pause ──► the next child
        │          └────────────────────► ▲ └──► QUARANTINED ──► ENDED
        └─────────────────────────────────┘

Owns: the status of each child, its limits, its end, and the start of the next one. Must not know how a child is
started, what is said to it, nor what is lost with it: a subclass of SupervisedChild knows that.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import math
import os
import signal
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from app import clock
from app.processes.breaker import Breaker
from app.processes.forking import is_stopped

_POLL_S = 0.02


class Child:
    """A child process of this one. `exited`, once it is reaped, has its exit status, minus the signal that ended it;
    None if that is not known.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._loop = asyncio.get_running_loop()
        self.exited: asyncio.Future[int | None] = self._loop.create_future()
        # Not the end of a socket: a process started by the child may still hold that.
        try:
            self._handle = os.pidfd_open(pid)
        except (AttributeError, OSError):  # A kernel or sandbox without pidfd.
            self._handle = -1
            self._loop.call_soon(self._look)
        else:
            self._loop.add_reader(self._handle, self._look)

    def kill(self) -> None:
        """End the child now, if the system can. Until it is reaped its number is no other process's."""
        if not self.exited.done():
            with contextlib.suppress(OSError):
                os.kill(self.pid, signal.SIGKILL)

    async def ends_within(self, limit_s: float) -> bool:
        """Wait for the child to be reaped; return True if it is within this time."""
        await asyncio.wait((self.exited,), timeout=limit_s)
        return self.exited.done()

    def _look(self) -> None:
        status = None
        with contextlib.suppress(ChildProcessError):
            pid, waited = os.waitpid(self.pid, os.WNOHANG)
            if pid == 0:
                if self._handle < 0:
                    self._loop.call_later(_POLL_S, self._look)
                return
            status = os.waitstatus_to_exitcode(waited)
        if self._handle >= 0:
            self._loop.remove_reader(self._handle)
            os.close(self._handle)
        self.exited.set_result(status)


class AttendedClock:
    """Seconds in which this process could hear its children: a gap in which it did not look at all counts as two looks.

    So no child is blamed for time in which this process itself stood still.
    """

    def __init__(self, look_s: float) -> None:
        self._most_s = 2 * look_s
        self._counted_s = 0.0
        self._looked_s = clock.monotonic()

    def now_s(self) -> float:
        """Return the seconds since the clock was made."""
        return self._counted_s + min(clock.monotonic() - self._looked_s, self._most_s)

    def look(self) -> float:
        """Return the same, and begin the next gap. To be called every `look_s`."""
        self._counted_s, self._looked_s = self.now_s(), clock.monotonic()
        return self._counted_s


class ChildStatus(enum.Enum):
    """Status of a child."""

    STARTING = "starting"
    READY = "ready"
    """It takes work."""
    RETIRING = "retiring"
    """It ends after the work that it has."""
    ENDING = "ending"
    """It is disconnected; its process is waited for, and killed."""
    QUARANTINED = "quarantined"
    """Its process was killed and has not ended."""
    ENDED = "ended"


MOVES = {
    ChildStatus.STARTING: {ChildStatus.READY, ChildStatus.ENDING},
    ChildStatus.READY: {ChildStatus.RETIRING, ChildStatus.ENDING},
    ChildStatus.RETIRING: {ChildStatus.ENDING},
    ChildStatus.ENDING: {ChildStatus.QUARANTINED, ChildStatus.ENDED},
    ChildStatus.QUARANTINED: {ChildStatus.ENDED},
    ChildStatus.ENDED: set(),
}


class Cause(enum.Enum):
    """Cause of a child's end."""

    DIED = "died"
    HUNG = "hung"
    START = "start"
    """It was never ready."""
    REPLACED = "replaced"
    STOPPED = "stopped"


class ChildStartError(ConnectionError):
    """A child ended before it was ready; the message has the reason."""


class SupervisedChild:
    """A child process from its start to its end. A subclass adds its connection.

    `process`: set by `begin`; `over`: has the reason of its end; `exit_status`: of the reaped process, minus the signal
    that ended it; `has_served`: True if it has done some of its work. Limits in seconds: `look_s` between looks;
    `start_s` of silence in its start; `end_s` for its process to end once it is disconnected, `kill_s` once killed.
    """

    look_s, start_s, end_s, kill_s = 1.0, math.inf, 2.0, 10.0

    def __init__(self, name: str) -> None:
        self.name = name
        self.status, self.cause = ChildStatus.STARTING, Cause.DIED
        self.process: Child | None = None
        self.exit_status: int | None = None
        self.has_served = False
        self.ready_s = math.inf
        self.over: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.moved: Callable[[Any], None] = lambda _: None
        """Set by the supervisor: hears each move."""
        self._clock, self._heard_s = AttendedClock(self.look_s), 0.0

    @property
    def pid(self) -> int | None:
        """Return the process id; None before the start."""
        return None if self.process is None else self.process.pid

    @property
    def is_ready(self) -> bool:
        """Return True if it takes work."""
        return self.status is ChildStatus.READY

    async def begin(self) -> None:
        """Start the process and set `process`; undo everything if cancelled. Raises OSError."""
        raise NotImplementedError

    def disconnect(self) -> None:
        """Close the connection, if there is one. Idempotent."""
        raise NotImplementedError

    def answer_s(self) -> float:
        """Return how long it may be silent now."""
        raise NotImplementedError

    def look(self) -> None:
        """Do what is due every `look_s` while it is well, as to ask whether it answers."""

    def gone(self) -> None:
        """Note that its process has ended or cannot be killed: what it had is lost. Called once."""

    def hear(self) -> None:
        """Note that it is not silent."""
        self._heard_s = self._clock.now_s()

    def check(self) -> None:
        """Kill it if it is silent for too long."""
        silent_s = self._clock.look() - self._heard_s
        if self.process is None or self.over.done():
            return
        limit_s, is_starting = self.answer_s(), self.status is ChildStatus.STARTING
        stopped = silent_s > limit_s and is_stopped(self.process.pid)
        if is_starting and not stopped:
            limit_s = self.start_s
        if self.process.exited.done() and silent_s > self.look_s:  # What it said last has been read.
            self.end("it ended")
        elif silent_s <= limit_s:
            if not is_starting:
                self.look()
        elif stopped:
            self.kill(f"it was stopped from outside: no answer for {silent_s:.1f} s")
        elif is_starting:
            self.kill(f"it was not ready within {limit_s:g} s")
        else:
            self.kill(f"it hung: no answer for {silent_s:.1f} s", Cause.HUNG)

    def end(self, reason: str, cause: Cause = Cause.DIED) -> None:
        """Disconnect the child; its process has `end_s` to end by itself. Idempotent."""
        if not self.over.done():
            is_starting = self.status is ChildStatus.STARTING and cause in (Cause.DIED, Cause.HUNG)
            self.cause = Cause.START if is_starting else cause
            self.over.set_result(reason)
            self.move(ChildStatus.ENDING)
            self.disconnect()

    def kill(self, reason: str, cause: Cause = Cause.DIED) -> None:
        """Kill the process and disconnect the child. Idempotent."""
        if self.process is not None:
            self.process.kill()
        self.end(reason, cause)

    async def reap(self) -> None:
        """Wait for the process of a child that has ended; kill it after `end_s`."""
        process = self.process
        if process is not None and not await process.ends_within(self.end_s):
            process.kill()
            if not await process.ends_within(self.kill_s):
                self.move(ChildStatus.QUARANTINED)
                process.exited.add_done_callback(lambda _: self.move(ChildStatus.ENDED))
                return
        self.exit_status = None if process is None else process.exited.result()
        self.move(ChildStatus.ENDED)

    def move(self, status: ChildStatus) -> None:
        """Change the status. Raises ValueError if the child cannot move so."""
        if status not in MOVES[self.status]:
            raise ValueError(f"{self.name} cannot be {status.value} after {self.status.value}")
        self.status = status
        if status is ChildStatus.READY:
            self.ready_s = clock.monotonic()
        self.moved(self)


C = TypeVar("C", bound=SupervisedChild)


class Supervisor(Generic[C]):
    """Supervisor of one place, which keeps a child in it. Made and stopped inside one running event loop.

    `child`: the newest one; `ready`: a future with the next one that is ready; it fails with ChildStartError if the
    one that starts ends before. A place that `breaks` is tried once a minute if its children die too often.
    """

    def __init__(self, make: Callable[[], C], log: logging.Logger, *, breaks: bool = False) -> None:
        """Start soon. `make`: makes a child that `begin` then starts."""
        self._loop = asyncio.get_running_loop()
        self.breaker = Breaker(breaks=breaks)
        self.ready: asyncio.Future[C] = self._loop.create_future()
        self._make, self._log = make, log
        self._pause_s = 0.0
        self._reported = False  # A child that did not start was reported, and none was ready since.
        self._stopped: asyncio.Future[None] = self._loop.create_future()
        self.child = self._next()
        self._task = self._loop.create_task(self._keep(), name=f"place of {self.child.name}")

    @property
    def is_closed(self) -> bool:
        """Return True if no other child starts."""
        return self._stopped.done()

    def close(self) -> None:
        """Start no other child. Idempotent."""
        if not self._stopped.done():
            self._stopped.set_result(None)

    async def stop(self, within_s: float = 0.0) -> None:
        """Start no other child; kill the one there is after this time. Idempotent."""
        self.close()
        if within_s:
            await asyncio.wait((self.child.over,), timeout=within_s)
        self.child.kill("it was stopped", Cause.STOPPED)
        await asyncio.wait((self._task,))

    def _next(self) -> C:
        child = self._make()
        child.moved = self._moved
        return child

    async def _keep(self) -> None:
        while True:
            await self._run(self.child)
            self._report(self.child)
            try:
                self.child.gone()
            except Exception:
                self._log.exception("%s: what it had could not be given back", self.child.name)
            await asyncio.wait((self._stopped,), timeout=self._pause_s)
            if self.is_closed:
                break
            self.child = self._next()
        self._refuse("it was stopped")

    async def _run(self, child: C) -> None:
        """Start a child, watch it, and reap it."""
        starting = self._loop.create_task(child.begin())
        self._timer = self._loop.call_later(child.look_s, self._look, child)
        await asyncio.wait((starting, child.over), return_when=asyncio.FIRST_COMPLETED)
        starting.cancel()
        await asyncio.wait((starting,))
        child.hear()
        error = None if starting.cancelled() else starting.exception()
        if error is not None and not child.over.done():
            if not isinstance(error, OSError):
                self._log.error("%s could not be started", child.name, exc_info=error)
            child.end(f"it could not be started: {error}")
        await asyncio.wait((child.over,))
        self._timer.cancel()
        child.disconnect()  # It may have been connected in the moment of its end.
        await child.reap()

    def _look(self, child: C) -> None:
        self._timer = self._loop.call_later(child.look_s, self._look, child)
        child.check()

    def _moved(self, child: C) -> None:
        if child.status is ChildStatus.READY:
            self.ready.set_result(child)
            if self._reported:
                self._reported = False
                self._log.info("%s is ready", child.name)
        elif child.status is ChildStatus.ENDING:
            if self.is_closed:
                child.cause = Cause.STOPPED
            self._pause_s = 0.0
            if child.cause not in (Cause.REPLACED, Cause.STOPPED):
                now_s = clock.monotonic()
                served_s = max(0.0, now_s - child.ready_s)
                self._pause_s = self.breaker.died(now_s, answered=child.has_served, served_s=served_s)
            self._refuse(child.over.result())
            self.ready = self._loop.create_future()

    def _refuse(self, reason: str) -> None:
        """Fail what waits for a child that is ready."""
        if not self.ready.done():
            self.ready.set_exception(ChildStartError(f"{self.child.name} did not start: {reason}"))
            self.ready.exception()  # Marks it as seen, in case no task waits.

    def _report(self, child: C) -> None:
        """Log the end of a child, and of several in a row that do not start only the first one."""
        reason = child.over.result()
        if child.status is ChildStatus.QUARANTINED:
            self._log.critical("%s: its process %s cannot be killed and is left behind", child.name, child.pid)
        if child.cause is Cause.START and not self._reported:
            self._reported = True
            self._log.error("%s did not start: %s; it is tried again", child.name, reason)
        elif child.cause in (Cause.DIED, Cause.HUNG):
            text = "%s is gone: %s (status %s); another one starts in %g s"
            self._log.error(text, child.name, reason, child.exit_status, self._pause_s)
