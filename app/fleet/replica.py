"""Replicas: places on devices that always have a worker, or are about to have one.

Owns: when a worker is started, replaced and given up. Must not know how a process is watched (process) or spawned.
Everything here runs in the event loop's thread: workers also die with the thread that started them (see main).

One way of replacing a worker serves every need: start another, let it load and warm, swap, drain the old one, stop it.
After a crash there is no old one left to drain. The breaker decides when the next worker is started after deaths, and
when a replica is broken. A worker whose process cannot be killed leaves its replica quarantined until that process is
gone: it still holds the device.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from app import clock
from app.fleet.process import Computed, Message, WorkerPlan, WorkerProcess, WorkerStartError
from app.processes.arena import Arena
from app.processes.breaker import Breaker

log = logging.getLogger("anychip.workers")


@dataclass(frozen=True)
class Events:
    """Callbacks for the owner of replicas.

    `gone`: once for each worker that was ready, with the reason. `died`: a replica lost its worker, with the kind of
    death: "died", "hung", "lost" (its device), "leaked" or "start" (it was never ready). `broken`: a replica is given
    up for a while, with the reason.
    """

    ready: Callable[[WorkerProcess], None]
    computed: Computed
    message: Callable[[WorkerProcess, Message], None]
    retiring: Callable[[WorkerProcess], None]
    gone: Callable[[WorkerProcess, str], None]
    died: Callable[[Replica, str], None]
    broken: Callable[[Replica, str], None]


class Replica:
    """One place on a device that always has a worker, or is about to have one.

    `state`: "starting" (never ready yet), "ready", "restarting", "broken" (tried again once a minute), "quarantined" (a
    process that cannot be killed holds the device), "stopped"; `reason`: why it is not ready.
    """

    def __init__(self, device: str, plan: WorkerPlan, arena: Arena, events: Events) -> None:
        self.device = device
        self.state = "starting"
        self.reason = "it is loading"
        self.restarts = 0
        self.plan = plan
        self._arena = arena
        self._events = events
        self._current: WorkerProcess | None = None
        self._old: set[WorkerProcess] = set()
        self._breaker = Breaker()
        self._pause_s = 0.0
        self._ready_s = 0.0
        self._replacing = asyncio.Lock()
        self._draining: set[asyncio.Task[None]] = set()
        self._first_ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._keep(), name=f"replica {device}")

    @property
    def current(self) -> WorkerProcess | None:
        """The worker that serves, None while there is none."""
        return self._current

    @property
    def loaded(self) -> set[int]:
        """The numbers of the models that its workers have loaded, also of one that is not ready yet."""
        return {index for worker in self._workers() for index in worker.loaded}

    async def wait_ready(self) -> None:
        """Wait until the replica has been ready once. Raises WorkerStartError."""
        await asyncio.shield(self._first_ready)

    async def prepare(self, plan: WorkerPlan, *, start: bool = True) -> WorkerProcess | None:
        """Start a worker that follows `plan` beside the one that serves, until it is ready; return None if not to
        `start`.

        `take_over` or `discard` must follow: until then the replica starts no other worker. Raises WorkerStartError
        when the new one cannot start; the old one then serves on, by the old plan.
        """
        await self._replacing.acquire()
        try:
            return await self._start(plan) if start else None
        except BaseException:
            self._replacing.release()
            raise

    def take_over(self, worker: WorkerProcess | None, plan: WorkerPlan, drain_timeout_s: float) -> asyncio.Task[None]:
        """Let the prepared worker serve and follow `plan` from now on. Return the task that drains the old worker.

        Batches that the old one has not finished after `drain_timeout_s` are lost to it, as in a crash, and tried
        again. Raises WorkerStartError if the new worker has died since it was ready; the old one then serves on.
        """
        old = self._current
        try:
            if worker is not None:
                self._swap(worker)
        except BaseException:
            self._replacing.release()
            raise
        self.plan = plan
        draining = asyncio.create_task(
            self._end_hand_over(old if worker is not None else None, drain_timeout_s), name=f"drain {self.device}"
        )
        self._draining.add(draining)
        draining.add_done_callback(self._draining.discard)
        return draining

    async def discard(self, worker: WorkerProcess | None) -> None:
        """End the prepared worker: it does not take over."""
        try:
            if worker is not None:
                await worker.stop()
        finally:
            self._replacing.release()

    async def _end_hand_over(self, old: WorkerProcess | None, drain_timeout_s: float) -> None:
        try:
            if old is not None:
                await self._drain(old, drain_timeout_s)
        finally:
            self._replacing.release()

    async def stop(self) -> None:
        """Stop whatever runs. Idempotent."""
        self.state, self.reason = "stopped", "the service is shutting down"
        self._task.cancel()
        await asyncio.gather(*(worker.stop() for worker in self._workers()))
        await asyncio.gather(self._task, *self._draining, return_exceptions=True)
        if not self._first_ready.done():
            self._first_ready.cancel()

    def kill(self) -> None:
        """End every worker now, whatever it does: for a service that has no time left to stop."""
        for worker in self._workers():
            worker.kill("the service has no time left")

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
                    self._first_ready.exception()  # Marks it as seen, in case no task waits.
                    self.state, self.reason = "broken", str(error)
                    return
                self._died(str(error), error.worker)
                if error.worker.abandoned:
                    await self._quarantine(error.worker)
            else:
                # A hand-over replaces the current worker: the one that dies is then no longer current.
                while (worker := self._current) is not None:
                    reason = await asyncio.shield(worker.ended)
                    if worker is self._current:
                        self._current = None
                        self._died(reason, worker)
                        if worker.abandoned:
                            await self._quarantine(worker)
            await self._pause()

    def _died(self, reason: str, worker: WorkerProcess) -> None:
        kind = "start" if worker.ready is None else worker.end
        if kind != "leaked" or not worker.answered:  # A leaking one ends to give memory back, as it should.
            now_s = clock.monotonic()
            served_s = 0.0 if worker.ready is None else now_s - self._ready_s
            self._pause_s = self._breaker.died(now_s, answered=worker.answered, served_s=served_s)
        self.restarts += 1
        self.state, self.reason = "restarting", reason
        log.error("%s: the worker is gone: %s", self.device, reason)
        self._events.died(self, kind)

    async def _quarantine(self, worker: WorkerProcess) -> None:
        """Leave the device alone until the process that holds it is gone."""
        self.state = "quarantined"
        log.critical("%s is quarantined: %s", self.device, self.reason)
        self._events.broken(self, self.reason)
        await asyncio.shield(worker.exited)
        log.warning("%s: the process %s is gone at last, a worker is started again", self.device, worker.pid)
        self.state = "restarting"

    async def _pause(self) -> None:
        pause_s, self._pause_s = self._pause_s, 0.0
        if pause_s and self._breaker.reason:
            self.state = "broken"
            self.reason = f"{self._breaker.reason}, the last one so: {self.reason}"
            log.error("%s is broken, the next try is in %g s: %s", self.device, pause_s, self.reason)
            self._events.broken(self, self.reason)
        await asyncio.sleep(pause_s)

    async def _start(self, plan: WorkerPlan) -> WorkerProcess:
        worker = WorkerProcess(self.device, plan, self._arena, self._events.computed, self._events.message)
        self._old.add(worker)  # Not current yet, but to be stopped with the rest.
        worker.ended.add_done_callback(lambda _: self._forget(worker))
        try:
            await worker.start()
        except asyncio.CancelledError:
            await worker.stop()
            raise
        return worker

    def _swap(self, worker: WorkerProcess) -> None:
        if worker.ended.done():
            raise WorkerStartError(worker.ended.result(), worker)
        old, self._current = self._current, worker
        self._old.discard(worker)
        if old is not None:
            self._old.add(old)
        self.state, self.reason = "ready", ""
        self._ready_s = clock.monotonic()
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
