"""Places that always have a child process, or are about to have one: how a child starts, is watched, ends, is replaced.

    STARTING ──► PREPARED ──► READY ──► RETIRING ──► ENDING ──► ENDED ──► pause ──► the next child
        └──────────────────────► ▲ each of them ───────► ▲ └──► QUARANTINED ──► ENDED

How a child is started, what is said to it and what is lost with it a subclass of SupervisedChild knows.
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


class ChildStatus(enum.Enum):
    """Status of a child."""

    STARTING = "starting"
    PREPARED = "prepared"
    """It could take work: the supervisor decides when it does."""
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
    ChildStatus.STARTING: {ChildStatus.PREPARED, ChildStatus.READY, ChildStatus.ENDING},
    ChildStatus.PREPARED: {ChildStatus.READY, ChildStatus.ENDING},
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
    FROZEN = "frozen"
    """Another process has stopped it, and it was silent for too long."""
    LOST = "lost"
    """It has lost its device."""
    LEAKED = "leaked"
    """It has ended to give memory back."""
    START = "start"
    """It was never ready."""
    REPLACED = "replaced"
    STOPPED = "stopped"


class ChildStartError(ConnectionError):
    """A child ended before it was ready; the message has the reason."""


class SupervisedChild:
    """A child process from its start to its end. A subclass adds its connection.

    `process`: set by `begin`; `over`: has the reason of its end; `exit_status`: of the reaped process, minus the signal
    that ended it; `has_served`: True if it has done some of its work; `received_s`: when it last was not silent
    (`clock.monotonic()`). Limits in seconds: `look_s` between looks; `start_s` of silence in its start; `end_s` for its
    process to end once it is disconnected, `kill_s` once killed.
    """

    look_s, start_s, end_s, kill_s = 1.0, math.inf, 2.0, 10.0

    def __init__(self, name: str) -> None:
        self.name = name
        self.status, self.cause = ChildStatus.STARTING, Cause.DIED
        self.process: Child | None = None
        self.exit_status: int | None = None
        self.has_served = False
        self.ready_s = math.inf
        loop = asyncio.get_running_loop()
        self.over: asyncio.Future[str] = loop.create_future()
        self.started: asyncio.Future[None] = loop.create_future()
        """Done once it is prepared or ready."""
        self.moved: Callable[[Any], None] = lambda _: None
        """Set by the supervisor: hears each move."""
        self.received_s = self._looked_s = clock.monotonic()

    @property
    def pid(self) -> int | None:
        """Return the process id; None before the start."""
        return None if self.process is None else self.process.pid

    @property
    def is_ready(self) -> bool:
        """Return True if it takes work."""
        return self.status is ChildStatus.READY

    @property
    def has_failed(self) -> bool:
        """Return True if its end counts against its place."""
        if self.cause is Cause.LEAKED:
            return not self.has_served
        return self.cause not in (Cause.REPLACED, Cause.STOPPED)

    @property
    def reason(self) -> str:
        """Return why it has ended, and how its process did."""
        reason = self.over.result()
        if self.status is ChildStatus.QUARANTINED:
            return f"{reason}; its process {self.pid} cannot be killed and is left behind, with what it holds"
        return f"{reason}, exit code {self.exit_status}" if self.exit_status else reason

    async def begin(self) -> None:
        """Start the process and set `process`; undo everything if cancelled. Raises OSError."""
        raise NotImplementedError

    def disconnect(self) -> None:
        """Close the connection, if there is one. Idempotent."""
        raise NotImplementedError

    def answer_s(self) -> float:
        """Return how long it may be silent now."""
        raise NotImplementedError

    def has_work(self) -> bool:
        """Return True if it has something to finish before it retires."""
        return False

    def look(self) -> None:
        """Do what is due every `look_s` while it is well, as to ask whether it answers."""

    def gone(self) -> None:
        """Note that its process has ended or cannot be killed: what it had is lost. Called once."""

    def forgive(self, seconds: float, now_s: float) -> None:
        """Leave out seconds in which this process did not look: no child is blamed for them."""
        self.received_s = min(self.received_s + seconds, now_s)

    def check(self) -> None:
        """Kill it if it is silent for too long. A gap between two looks counts as twice `look_s` at most."""
        now_s = clock.monotonic()
        stood_still_s, self._looked_s = now_s - self._looked_s - 2 * self.look_s, now_s
        if stood_still_s > 0:
            self.forgive(stood_still_s, now_s)
        silent_s = now_s - self.received_s
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
            self.leave()
        elif stopped:
            self.kill(f"it was stopped from outside: no answer for {silent_s:.1f} s", Cause.FROZEN)
        elif is_starting:
            self.kill(f"it was not ready within {limit_s:g} s")
        else:
            self.kill(f"it hung: no answer for {silent_s:.1f} s", Cause.HUNG)

    def retire(self) -> None:
        """Take no more work; end once none is left."""
        self.move(ChildStatus.RETIRING)
        self.leave()

    def leave(self) -> None:
        """End if it retires and has no work left."""
        if self.status is ChildStatus.RETIRING and not self.has_work():
            self.end("it was replaced", Cause.REPLACED)

    def stop(self) -> None:
        """End, wanted or not."""
        self.kill("it was stopped", Cause.STOPPED)

    def end(self, reason: str, cause: Cause = Cause.DIED) -> None:
        """Disconnect the child; its process has `end_s` to end by itself. Idempotent."""
        if not self.over.done():
            never_was = self.status is ChildStatus.STARTING and cause not in (Cause.REPLACED, Cause.STOPPED)
            self.cause = Cause.START if never_was else cause
            self.over.set_result(reason)
            self.move(ChildStatus.ENDING)
            self.disconnect()

    def kill(self, reason: str, cause: Cause = Cause.DIED) -> None:
        """Kill the process and disconnect the child. Idempotent."""
        self.end_s = 0.0
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
        if status in (ChildStatus.PREPARED, ChildStatus.READY) and not self.started.done():
            self.started.set_result(None)
        self.moved(self)


class PlaceStatus(enum.Enum):
    """Status of a place."""

    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    BROKEN = "broken"
    """Its children die too often: it is tried once a minute."""
    QUARANTINED = "quarantined"
    """A process that cannot be killed holds what only one may have."""
    STOPPED = "stopped"


C = TypeVar("C", bound=SupervisedChild)


class Supervisor(Generic[C]):
    """Supervisor of one place, which keeps a child in it. Made and stopped inside one running event loop.

    `child`: the one that serves or starts, or the last one; `ready`: a future with the next one that is ready; it fails
    with ChildStartError if the one that starts ends before. `restarts`: number of children that it has lost.

    A place that `breaks` is tried once a minute if its children die too often. In an `exclusive` one no other starts
    while a process that cannot be killed is there: it still holds the device.

    A hand-over replaces a child that still serves: another one starts beside it, takes over, and the old one ends once
    it has no work left.
    """

    def __init__(
        self, make: Callable[[], C], log: logging.Logger, *, breaks: bool = False, exclusive: bool = False
    ) -> None:
        """Start soon. `make`: makes a child that `begin` then starts."""
        self._loop = asyncio.get_running_loop()
        self.breaker = Breaker(breaks=breaks)
        self.ready: asyncio.Future[C] = self._loop.create_future()
        self.restarts = 0
        self._make, self._log, self._exclusive = make, log, exclusive
        self._pause_s, self._reason = 0.0, "it is loading"
        self._reported = False  # A child that did not start was reported, and none was ready since.
        self._stopped: asyncio.Future[None] = self._loop.create_future()
        self._replacing = asyncio.Lock()
        self._lives: dict[C, asyncio.Task[None]] = {}
        self.child = self._begun(make())
        self._task = self._loop.create_task(self._keep(), name=f"place of {self.child.name}")

    @property
    def children(self) -> list[C]:
        """Return all whose process may still be there: beside the newest one, those that a hand-over starts or ends."""
        return [*self._lives]

    @property
    def is_closed(self) -> bool:
        """Return True if no other child starts."""
        return self._stopped.done()

    @property
    def status(self) -> PlaceStatus:
        """Return the status of the place."""
        if self.is_closed:
            return PlaceStatus.STOPPED
        if self.child.is_ready:
            return PlaceStatus.READY
        if self._exclusive and self.child.status is ChildStatus.QUARANTINED:
            return PlaceStatus.QUARANTINED
        if self.breaker.reason:
            return PlaceStatus.BROKEN
        return PlaceStatus.RESTARTING if self.restarts else PlaceStatus.STARTING

    @property
    def reason(self) -> str:
        """Return why no child is ready; empty if one is."""
        if self.status is PlaceStatus.READY:
            return ""
        if self.status is PlaceStatus.BROKEN:
            return f"{self.breaker.reason}, the last one so: {self._reason}"
        return self._reason

    def close(self) -> None:
        """Start no other child. Idempotent."""
        if not self._stopped.done():
            self._stopped.set_result(None)

    def kill(self, reason: str) -> None:
        """Kill every child now, and start no other."""
        self.close()
        for child in self.children:
            child.kill(reason, Cause.STOPPED)

    async def stop(self, within_s: float = 0.0) -> None:
        """Start no other child; end those there are after this time. Idempotent."""
        self.close()
        self._reason = "the service is shutting down"
        if within_s:
            await asyncio.wait((self.child.over,), timeout=within_s)
        self._task.cancel()
        for child in self.children:
            child.stop()
        await asyncio.wait((self._task, *self._lives.values()))
        self._refuse("it was stopped")

    async def prepare(self, child: C | None) -> None:
        """Start a child beside the one that serves; return once it is prepared. None: only let no other one start.

        `take_over` or `discard` must follow: until then no other child starts. Raises ChildStartError if it ends before
        it is prepared; the old one then serves on.
        """
        await self._replacing.acquire()
        try:
            if child is not None:
                await self._started(self._begun(child))
                if child.over.done():
                    raise ChildStartError(child.reason)
        except BaseException:
            await self.discard(child)
            raise

    def take_over(self, child: C | None, drain_s: float) -> asyncio.Future[None]:
        """Let the prepared child serve from now on. Return a future that is done once the old one is gone.

        What the old one has not finished after `drain_s` is lost to it, as in a crash. Raises ChildStartError if the
        new one has ended since it was prepared; the old one then serves on.
        """
        old = self.child
        if child is None or child.over.done():
            self._replacing.release()
            if child is not None:
                raise ChildStartError(child.over.result())
            return asyncio.ensure_future(asyncio.sleep(0))
        self.child = child
        child.move(ChildStatus.READY)
        life = self._lives.get(old)
        if life is None:
            self._replacing.release()
            return asyncio.ensure_future(asyncio.sleep(0))
        if old.is_ready:
            old.retire()
        reason = "it was replaced and did not finish its work in time"
        late = self._loop.call_later(drain_s, old.kill, reason, Cause.REPLACED)
        old.over.add_done_callback(lambda _: late.cancel())
        life.add_done_callback(lambda _: self._replacing.release())
        return life

    async def discard(self, child: C | None) -> None:
        """End the prepared child: it does not take over."""
        try:
            if child is not None and child in self._lives:
                child.stop()
                await asyncio.wait((self._lives[child],))
        finally:
            self._replacing.release()

    def lost(self, child: C) -> None:
        """Note that the place has lost a child that was neither stopped nor replaced; `child.cause` says how."""

    def _begun(self, child: C) -> C:
        child.moved = self._moved
        self._lives[child] = self._loop.create_task(self._run(child), name=f"life of {child.name}")
        return child

    async def _started(self, child: C) -> None:
        await asyncio.wait((child.started, self._lives[child]), return_when=asyncio.FIRST_COMPLETED)

    async def _keep(self) -> None:
        while not self.is_closed:
            async with self._replacing:
                if self.child not in self._lives:
                    self.child = self._begun(self._make())
                await self._started(self.child)
            while (life := self._lives.get(self.child)) is not None:  # A hand-over may change the child meanwhile.
                await asyncio.wait((life,))
            if self.status is PlaceStatus.QUARANTINED and self.child.process is not None:
                exited = self.child.process.exited
                await asyncio.wait((exited, self._stopped), return_when=asyncio.FIRST_COMPLETED)
                if exited.done():
                    self._log.warning("the process %s is gone at last", self.child.pid)
            await asyncio.wait((self._stopped,), timeout=self._pause_s)

    async def _run(self, child: C) -> None:
        try:
            starting = self._loop.create_task(child.begin())
            self._look(child)
            await asyncio.wait((starting, child.over), return_when=asyncio.FIRST_COMPLETED)
            starting.cancel()
            await asyncio.wait((starting,))
            child.received_s = clock.monotonic()
            error = None if starting.cancelled() else starting.exception()
            if error is not None and not child.over.done():
                if not isinstance(error, OSError):
                    self._log.error("%s could not be started", child.name, exc_info=error)
                child.end(f"it could not be started: {error}")
            await asyncio.wait((child.over,))
            child.disconnect()  # It may have been connected in the moment of its end.
            await child.reap()
            self._ended(child)
        finally:
            del self._lives[child]

    def _look(self, child: C) -> None:
        if not child.over.done():
            self._loop.call_later(child.look_s, self._look, child)
            child.check()

    def _moved(self, child: C) -> None:
        if child.status is ChildStatus.ENDING and self.is_closed:
            child.cause = Cause.STOPPED
        if child is not self.child:  # It is to take over, or was replaced.
            return
        if child.status is ChildStatus.PREPARED:
            child.move(ChildStatus.READY)
        elif child.status is ChildStatus.READY:
            if self.ready.done():  # The one before was replaced.
                self.ready = self._loop.create_future()
            self.ready.set_result(child)
            if self._reported:
                self._reported = False
                self._log.info("%s is ready", child.name)
        elif child.status is ChildStatus.ENDING:
            self._pause_s = 0.0
            if child.has_failed:
                now_s = clock.monotonic()
                served_s = max(0.0, now_s - child.ready_s)
                self._pause_s = self.breaker.died(now_s, answered=child.has_served, served_s=served_s)
            if self.ready.done():
                self.ready = self._loop.create_future()

    def _refuse(self, reason: str) -> None:
        if not self.ready.done():
            self.ready.set_exception(ChildStartError(f"{self.child.name} did not start: {reason}"))
            self.ready.exception()  # Marks it as seen, in case no task waits.

    def _ended(self, child: C) -> None:
        """Report the end of a child, and of several in a row that do not start only the first one."""
        if child.status is ChildStatus.QUARANTINED:
            self._log.critical("%s: its process %s cannot be killed and is left behind", child.name, child.pid)
        is_lost = child is self.child and child.cause not in (Cause.REPLACED, Cause.STOPPED)
        if is_lost:
            self.restarts, self._reason = self.restarts + 1, child.reason
            reason = child.over.result()
            if child.cause is not Cause.START:
                text = "%s is gone: %s (status %s); another one starts in %g s"
                self._log.error(text, child.name, reason, child.exit_status, self._pause_s)
            elif not self._reported:
                self._reported = True
                self._log.error("%s did not start: %s; it is tried again", child.name, reason.rstrip("."))
        try:
            child.gone()
            if is_lost:
                self.lost(child)
        except Exception:
            self._log.exception("%s: what it had could not be given back", child.name)
        if child is self.child and child.ready_s == math.inf:
            self._refuse(child.reason)
            if not self.is_closed:
                self.ready = self._loop.create_future()
