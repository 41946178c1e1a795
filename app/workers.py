"""Worker processes as the event loop sees them.

Owns: starting, watching, restarting and stopping workers, and the pipes to them. Must not know what a batch is for.
Everything here runs in the event loop's thread: workers also die with the thread that started them (see worker.main).
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from app import worker as worker_process
from app.arena import Arena
from app.protocol import Load, Ready, StartFailed, Stop

log = logging.getLogger("anychip.workers")

_BACKOFF_S = (0.1, 0.5, 2.0, 5.0, 15.0)
_STOP_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Plan:
    """What a worker is to serve: the first message, the environment its process starts with, its time to load."""

    load: Load
    environment: Mapping[str, str] = field(default_factory=dict)
    start_timeout_s: float = 600.0
    log_level: str = "info"


@dataclass(frozen=True)
class Events:
    """Who hears what. `gone` comes once for each worker that was ready, with the reason."""

    ready: Callable[[str, Ready], None]
    message: Callable[[str, Any], None]
    gone: Callable[[str, str], None]


class WorkerStartError(Exception):
    """A worker could not start; the message is its own sentence."""


class WorkerProcess:
    """One worker from start to end; a crash is followed by a new process, after a pause that grows."""

    def __init__(self, name: str, plan: Plan, arena: Arena, events: Events) -> None:
        self.name = name
        self.restarts = 0
        self._plan = plan
        self._arena = arena
        self._events = events
        self._process: multiprocessing.process.BaseProcess | None = None
        self._connection: Connection[Any, Any] | None = None
        self._first_ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._end: asyncio.Future[str] | None = None
        self._is_ready = False
        self._stopping = False
        self._task = asyncio.create_task(self._supervise(), name=f"supervise {name}")

    @property
    def pid(self) -> int | None:
        """The process now, None between two."""
        return self._process.pid if self._process else None

    async def wait_ready(self) -> None:
        """Until the worker has been ready once. Raises WorkerStartError."""
        await asyncio.shield(self._first_ready)

    def send(self, message: Any) -> None:
        """Send a message; a worker that is just dying is reported through `gone`, not here."""
        if self._connection is not None:
            try:
                self._connection.send(message)
            except OSError as error:
                log.debug("%s: cannot send: %s", self.name, error)

    async def stop(self) -> None:
        """Stop, wait, and kill what does not listen. Idempotent."""
        self._stopping = True
        if self._is_ready:
            self.send(Stop())
        elif self._process is not None:
            self._process.kill()  # Still loading: it does not read its pipe and has nothing to lose.
        await asyncio.wait([self._task], timeout=_STOP_TIMEOUT_S)
        if not self._task.done():
            log.warning("%s does not stop; it is killed", self.name)
            if self._process is not None:
                self._process.kill()
            await self._task

    async def _supervise(self) -> None:
        try:
            while not self._stopping:
                reason = await self._live()
                if self._stopping:
                    return
                if not self._first_ready.done():
                    self._first_ready.set_exception(WorkerStartError(reason))
                    self._first_ready.exception()  # Whoever waits hears it; nobody need wait.
                    return
                pause_s = _BACKOFF_S[min(self.restarts, len(_BACKOFF_S) - 1)]
                self.restarts += 1
                log.error("%s is gone (%s); starting another in %.1f s", self.name, reason, pause_s)
                await asyncio.sleep(pause_s)
        finally:
            if not self._first_ready.done():
                self._first_ready.cancel()

    async def _live(self) -> str:
        """One process from spawn to death; returns why it ended."""
        loop = asyncio.get_running_loop()
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe(duplex=True)
        self._end = loop.create_future()
        self._connection = ours
        self._process = context.Process(
            target=worker_process.main,
            args=(theirs, self._arena, dict(self._plan.environment), self._plan.log_level),
            name=self.name,
            daemon=True,  # Should the server end in disorder, multiprocessing's own exit hook kills it too.
        )
        try:
            self._process.start()
            theirs.close()  # Ours would keep the pipe open after the worker's death.
            ours.send(self._plan.load)
            loop.add_reader(ours.fileno(), self._readable, ours)
            os.set_blocking(ours.fileno(), True)  # uvloop has unset it, and a Connection reads whole messages only.
            timer = loop.call_later(self._plan.start_timeout_s, self._start_timed_out)
            try:
                reason = await self._end
            finally:
                timer.cancel()
                loop.remove_reader(ours.fileno())
        except OSError as error:
            reason = f"its process could not be started: {error}"
        was_ready, self._is_ready = self._is_ready, False
        self._connection = None
        ours.close()
        await self._bury(self._process)
        reason = f"{reason}, exit code {self._process.exitcode}" if self._process.exitcode else reason
        self._process = None
        if was_ready:
            self._events.gone(self.name, reason)
        return reason

    async def _bury(self, process: multiprocessing.process.BaseProcess) -> None:
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

    def _readable(self, connection: Connection[Any, Any]) -> None:
        try:
            while connection.poll():
                self._handle(connection.recv())
        except (EOFError, ConnectionError):
            self._ended("it ended")
        except Exception as error:  # A message that cannot be read: nothing this worker says can be trusted.
            log.exception("%s: unreadable message", self.name)
            if self._process is not None:
                self._process.kill()
            self._ended(f"unreadable message: {error}")

    def _handle(self, message: Any) -> None:
        if isinstance(message, Ready):
            self._is_ready = True
            self._events.ready(self.name, message)
            if not self._first_ready.done():
                self._first_ready.set_result(None)
        elif isinstance(message, StartFailed):
            self._ended(message.reason)
        else:
            self._events.message(self.name, message)

    def _start_timed_out(self) -> None:
        if not self._is_ready and self._process is not None:
            self._process.kill()
            self._ended(f"it was not ready within {self._plan.start_timeout_s:g} s")

    def _ended(self, reason: str) -> None:
        if self._end is not None and not self._end.done():
            self._end.set_result(reason)
