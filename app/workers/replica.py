"""Worker processes as the event loop sees them.

    Replica: one place on a device, which always has a worker
        └─ WorkerProcess: one process, from spawn to death

Owns: starting, watching, replacing and stopping workers, and the pipes to them. Must not know what a batch is for.
Everything here runs in the event loop's thread: workers also die with the thread that started them (see main).

One way of replacing a worker serves every need: start another, let it load and warm, swap, drain the old one, stop it.
After a crash there is no old one left to drain. A worker that dies before it has answered anything counts against its
replica: the pauses before the next start grow, and after some such deaths in a row the replica is broken and tries
again only once a minute.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import multiprocessing
import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from app import logs
from app.workers import main as worker_main
from app.workers.arena import Arena
from app.workers.messages import Beat, Begin, Done, Ended, Failed, Load, Ready, Run, Stop

log = logging.getLogger("anychip.workers")

_BACKOFF_S = (0.0, 0.5, 2.0, 5.0)
_BREAKER_DEATHS = 5
_BREAKER_S = 60.0
_STOP_TIMEOUT_S = 10.0
_WATCH_INTERVAL_S = 0.25


@dataclass(frozen=True)
class Plan:
    """What a worker is to serve: the first message, the environment of its process, and its limits.

    `takes_prepared`: the environment may come when the libraries are loaded already.
    """

    load: Load
    environment: Mapping[str, str] = field(default_factory=dict)
    takes_prepared: bool = False
    start_timeout_s: float = 600.0
    batch_timeout_s: float = 30.0
    heartbeat_timeout_s: float = 10.0
    log_style: logs.Style = ("info", "auto")


@dataclass(frozen=True)
class Events:
    """Who hears what.

    `gone`: once for each worker that was ready, with the reason. `died`: a replica lost its worker, with the kind of
    death: "died", "hung", "lost" (its device), "leaked" or "start" (it was never ready). `broken`: a replica is
    given up for a while, with the reason.
    """

    ready: Callable[[WorkerProcess], None]
    message: Callable[[WorkerProcess, Any], None]
    retiring: Callable[[WorkerProcess], None]
    gone: Callable[[WorkerProcess, str], None]
    died: Callable[[Replica, str], None]
    broken: Callable[[Replica, str], None]


class WorkerStartError(Exception):
    """A worker could not start; the message is its own sentence."""


class _Spawned:
    """A process that waits for its first message, and our end of the pipe to it."""

    def __init__(self, name: str, prepare: bool = False) -> None:
        """Raises OSError."""
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe(duplex=True)
        self._surroundings = dict(os.environ)
        # Should the server end in disorder, multiprocessing's own exit hook kills a daemon, too.
        self.process = context.Process(target=worker_main.main, args=(theirs, prepare), name=name, daemon=True)
        try:
            self.process.start()
        except BaseException:
            self.connection.close()
            raise
        finally:
            theirs.close()  # Ours would keep the pipe open after the process's death.

    def environment(self, wanted: Mapping[str, str]) -> dict[str, str]:
        """What the process has to be told: what is wanted, and what has been set here since it was started."""
        return {**dict(os.environ.items() - self._surroundings.items()), **wanted}


_prepared: list[_Spawned] = []


def prepare() -> None:
    """Start a process for the first worker: while this one imports torch and what else it needs, that one does too.

    Whoever calls it calls `discard_prepared` in the end.
    """
    _prepared.append(_Spawned("prepared", prepare=True))


def discard_prepared() -> None:
    """End the process that no worker has taken, if there is one."""
    while _prepared:
        spawned = _prepared.pop()
        spawned.connection.close()
        spawned.process.kill()
        spawned.process.join()


def _taken() -> _Spawned | None:
    while _prepared:
        spawned = _prepared.pop()
        if spawned.process.is_alive():
            return spawned
        spawned.connection.close()
    return None


class WorkerProcess:
    """One worker from spawn to death. `ended` has the reason once the process is gone."""

    _numbers = itertools.count(1)

    def __init__(self, device: str, plan: Plan, arena: Arena, events: Events) -> None:
        self.device = device
        self.id = f"{device}#{next(self._numbers)}"
        self.plan = plan
        self.ready: Ready | None = None
        self.answered = False
        self.end = "died"
        self.retiring = False
        self.drained = asyncio.Event()
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._arena = arena
        self._events = events
        self._connection: Connection[Any, Any] | None = None
        self._process: multiprocessing.process.BaseProcess | None = None
        self._started: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        self._closed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._sent_s: deque[float] = deque()  # When each batch it has not answered was sent.
        self._heard_s = self._answered_s = time.monotonic()
        self._task = asyncio.create_task(self._live(), name=f"worker {self.id}")

    @property
    def pid(self) -> int | None:
        """The process's id, None before its start."""
        return self._process.pid if self._process else None

    async def start(self) -> Ready:
        """Until it is ready. Raises WorkerStartError; the process is then gone."""
        done, _ = await asyncio.wait((self._started, self._task), return_when=asyncio.FIRST_COMPLETED)
        if self._started not in done:
            raise WorkerStartError(self.ended.result())
        return self._started.result()

    def send(self, message: Any) -> None:
        """Send a message; a worker that is just dying is reported through `ended`, not here."""
        if isinstance(message, Run):
            self._sent_s.append(time.monotonic())
        if self._connection is not None:
            try:
                self._connection.send(message)
            except OSError as error:
                log.debug("%s: cannot send: %s", self.id, error)

    def kill(self, reason: str) -> None:
        """End the process now."""
        if self._process is not None and self._process.pid is not None:
            self._process.kill()
        self._close(reason)

    async def stop(self) -> None:
        """Stop, wait, and kill what does not listen. Idempotent."""
        if self.ready is not None:
            self.send(Stop())
            await asyncio.wait([self._task], timeout=_STOP_TIMEOUT_S)
        if not self._task.done():
            # Still loading, it does not read its pipe and has nothing to lose.
            self.kill("it was stopped")
        await self._task

    async def _live(self) -> None:
        """The process from spawn to death."""
        loop = asyncio.get_running_loop()
        try:
            taken = (_taken() if self.plan.takes_prepared else None) or _Spawned(self.id)
        except Exception as error:
            log.exception("%s: its process could not be started", self.id)
            self.ended.set_result(f"its process could not be started: {error}")
            return
        ours, process = self._connection, self._process = taken.connection, taken.process
        try:
            ours.send(Begin(self.id, taken.environment(self.plan.environment), self.plan.log_style, self._arena.pools))
            self._arena.send(ours, process.pid or 0)
            ours.send(self.plan.load)
            loop.add_reader(ours.fileno(), self._readable)
            os.set_blocking(ours.fileno(), True)  # uvloop has unset it, and a Connection reads whole messages only.
            timer = loop.call_later(self.plan.start_timeout_s, self._start_timed_out)
            try:
                reason = await self._watched()
            finally:
                timer.cancel()
                loop.remove_reader(ours.fileno())
        except Exception as error:
            log.exception("%s: its process could not be begun", self.id)
            reason = f"its process could not be begun: {error}"
        self._connection = None
        ours.close()
        await _bury(process)
        self.ended.set_result(f"{reason}, exit code {process.exitcode}" if process.exitcode else reason)

    async def _watched(self) -> str:
        """Until the pipe is closed; returns why. A worker that hangs is killed."""
        while True:
            with contextlib.suppress(asyncio.TimeoutError):
                return await asyncio.wait_for(asyncio.shield(self._closed), _WATCH_INTERVAL_S)
            if self.ready is None:
                continue
            # First hear what came while this loop was busy: a server that stood still must not blame its worker.
            while self._connection is not None and not self._closed.done() and self._connection.poll():
                self._readable()
            now_s = time.monotonic()
            if self._sent_s:
                running_s = now_s - max(self._sent_s[0], self._answered_s)
                if running_s > self.plan.batch_timeout_s:
                    self._hung(f"a batch was not done after {running_s:.1f} s")
            if now_s - self._heard_s > self.plan.heartbeat_timeout_s:
                self._hung(f"nothing was heard of it for {now_s - self._heard_s:.1f} s")

    def _hung(self, reason: str) -> None:
        self.end = "hung"
        self.kill(f"it hung: {reason}")

    def _readable(self) -> None:
        """One message; should there be more, the loop calls again."""
        if self._connection is None or self._closed.done():
            return
        try:
            self._handle(self._connection.recv())
        except (EOFError, ConnectionError):
            self._close("it ended")
        except Exception as error:  # A message that cannot be read: nothing this worker says can be trusted.
            log.exception("%s: unreadable message", self.id)
            self.kill(f"unreadable message: {error}")

    def _handle(self, message: Any) -> None:
        self._heard_s = time.monotonic()
        if isinstance(message, Beat):
            return
        if isinstance(message, Ready):
            self.ready = message
            self._started.set_result(message)
        elif isinstance(message, Ended):
            self.end = message.kind
            self._close(message.reason)
        else:
            if isinstance(message, Done | Failed):
                self._sent_s.popleft()
                self._answered_s = self._heard_s
                self.answered = self.answered or isinstance(message, Done)
            self._events.message(self, message)

    def _start_timed_out(self) -> None:
        if self.ready is None:
            self.kill(f"it was not ready within {self.plan.start_timeout_s:g} s")

    def _close(self, reason: str) -> None:
        if not self._closed.done():
            self._closed.set_result(reason)


async def _bury(process: multiprocessing.process.BaseProcess) -> None:
    """Wait for a process whose pipe has closed; kill it should it linger."""
    loop = asyncio.get_running_loop()
    if process.pid is None:
        return
    ended = loop.create_future()

    def wake() -> None:
        if not ended.done():
            ended.set_result(None)

    loop.add_reader(process.sentinel, wake)
    try:
        await asyncio.wait_for(asyncio.shield(ended), timeout=_STOP_TIMEOUT_S)
    except asyncio.TimeoutError:
        process.kill()
        await ended
    finally:
        loop.remove_reader(process.sentinel)
    process.join()


class Replica:
    """One place on a device that always has a worker, or is about to have one.

    `state`: "starting" (never ready yet), "ready", "restarting", "broken" (tried again once a minute), "stopped";
    `reason`: why it is not ready.
    """

    def __init__(self, device: str, plan: Plan, arena: Arena, events: Events) -> None:
        self.device = device
        self.state = "starting"
        self.reason = "it is loading"
        self.restarts = 0
        self.plan = plan
        self._arena = arena
        self._events = events
        self._current: WorkerProcess | None = None
        self._old: set[WorkerProcess] = set()
        self._deaths = 0  # In a row, of workers that had answered nothing.
        self._replacing = asyncio.Lock()
        self._stopping = False
        self._first_ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._keep(), name=f"replica {device}")

    @property
    def current(self) -> WorkerProcess | None:
        """The worker that serves, None while there is none."""
        return self._current

    async def wait_ready(self) -> None:
        """Until the replica has been ready once. Raises WorkerStartError."""
        await asyncio.shield(self._first_ready)

    async def hand_over(self, plan: Plan, drain_timeout_s: float) -> None:
        """Replace the worker by one that follows `plan`; the old one serves until the new one does, then drains.

        What the old one has not finished after `drain_timeout_s` is lost to it, as in a crash, and tried again.
        Raises WorkerStartError when the new one cannot start; the old one then serves on, by the old plan.
        """
        async with self._replacing:
            worker = await self._start(plan)
            old = self._current
            self._swap(worker)
            self.plan = plan
            if old is not None:
                await self._drain(old, drain_timeout_s)

    async def stop(self) -> None:
        """Stop whatever runs. Idempotent."""
        self._stopping = True
        self.state, self.reason = "stopped", "the service is shutting down"
        self._task.cancel()
        await asyncio.gather(*(worker.stop() for worker in self._workers()))
        await asyncio.gather(self._task, return_exceptions=True)
        if not self._first_ready.done():
            self._first_ready.cancel()

    def _workers(self) -> list[WorkerProcess]:
        return [*self._old, *([self._current] if self._current else [])]

    async def _keep(self) -> None:
        """Start a worker, and another whenever it dies."""
        while True:
            try:
                async with self._replacing:
                    if self._current is None:  # Else a hand-over was quicker.
                        self._swap(await self._start(self.plan))
            except WorkerStartError as error:
                if not self._first_ready.done():
                    self._first_ready.set_exception(error)
                    self._first_ready.exception()  # Whoever waits hears it; nobody need wait.
                    self.state, self.reason = "broken", str(error)
                    return
                self._died(str(error), "start")
            else:
                # A hand-over puts another in its place: the one that dies is then no longer the current one.
                while (worker := self._current) is not None:
                    reason = await asyncio.shield(worker.ended)
                    if worker is self._current:
                        self._current = None
                        if worker.answered:
                            self._deaths = 0
                        self._died(reason, worker.end)
            await self._pause()

    def _died(self, reason: str, kind: str) -> None:
        self._deaths += 1
        self.restarts += 1
        self.state, self.reason = "restarting", reason
        log.error("%s: the worker is gone: %s", self.device, reason)
        self._events.died(self, kind)

    async def _pause(self) -> None:
        if self._deaths >= _BREAKER_DEATHS:
            pause_s = _BREAKER_S
            self.state = "broken"
            self.reason = f"{self._deaths} workers died in a row, the last one so: {self.reason}"
            log.error("%s is broken, the next try is in %g s: %s", self.device, pause_s, self.reason)
            self._events.broken(self, self.reason)
        else:
            pause_s = _BACKOFF_S[min(self._deaths, len(_BACKOFF_S)) - 1]
        await asyncio.sleep(pause_s)

    async def _start(self, plan: Plan) -> WorkerProcess:
        worker = WorkerProcess(self.device, plan, self._arena, self._events)
        self._old.add(worker)  # Not the current one yet, but to be stopped with the rest.
        worker.ended.add_done_callback(lambda _: self._forget(worker))
        try:
            await worker.start()
        except asyncio.CancelledError:
            await worker.stop()
            raise
        return worker

    def _swap(self, worker: WorkerProcess) -> None:
        if worker.ended.done():
            raise WorkerStartError(worker.ended.result())
        old, self._current = self._current, worker
        self._old.discard(worker)
        if old is not None:
            self._old.add(old)
        self.state, self.reason = "ready", ""
        self._events.ready(worker)
        if old is not None:
            old.retiring = True
            self._events.retiring(old)
        if not self._first_ready.done():
            self._first_ready.set_result(None)

    async def _drain(self, old: WorkerProcess, timeout_s: float) -> None:
        drained = asyncio.ensure_future(old.drained.wait())
        waits: list[asyncio.Future[Any]] = [drained, old.ended]
        try:
            await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            drained.cancel()
        if not old.drained.is_set():
            old.kill("it was replaced and did not finish its work in time")
        await old.stop()

    def _forget(self, worker: WorkerProcess) -> None:
        self._old.discard(worker)
        if worker.ready is not None:
            self._events.gone(worker, worker.ended.result())
