"""Replicas: places on devices that always have a worker, or are about to have one.

Owns: the plan that their next worker follows, and what is counted of workers that died. app.processes.place owns when
a worker is started, watched, replaced and given up. Everything here runs in the event loop's thread: workers also die
with the thread that started them (see main).
"""

from __future__ import annotations

import asyncio

from app.fleet.process import Events, WorkerPlan, WorkerProcess, log
from app.processes.arena import Arena
from app.processes.place import Cause, ChildStartError, ChildStatus, PlaceStatus, Supervisor


class Replica(Supervisor[WorkerProcess]):
    """One place on a device; its workers follow `plan`, which a hand-over changes."""

    def __init__(self, device: str, plan: WorkerPlan, arena: Arena, events: Events) -> None:
        self.device, self.plan = device, plan
        self._arena, self._events = arena, events
        self._mends = False
        super().__init__(self._next, log, breaks=True, exclusive=True)

    def worker(self, plan: WorkerPlan) -> WorkerProcess:
        """Make a worker that follows `plan`, for this place or to take over from the one in it."""
        return WorkerProcess(self.device, plan, self._arena, self._events)

    def _next(self) -> WorkerProcess:
        """Make the worker of this place; after one that could not start it looks first whether copies are damaged."""
        worker = self.worker(self.plan)
        worker.mends = self._mends
        return worker

    @property
    def loaded(self) -> set[int]:
        """The numbers of the models that its workers have loaded, also of one that is not ready yet."""
        return {index for worker in self.children for index in worker.loaded}

    async def wait_ready(self) -> None:
        """Wait until a worker is ready. Raises ChildStartError with the worker's own sentence."""
        try:
            await asyncio.shield(self.ready)
        except ChildStartError:
            raise ChildStartError(self.child.reason) from None

    def lost(self, child: WorkerProcess) -> None:
        """Count a worker that died; the first one that cannot start is an error of the whole service."""
        if child.cause is Cause.START and self.restarts == 1:
            self.close()
            return
        self._mends = child.cause is Cause.START
        self._events.died(self.device, "hung" if child.cause is Cause.FROZEN else child.cause.value)
        if child.status is ChildStatus.QUARANTINED or self.status is PlaceStatus.BROKEN:
            log.error("%s is %s: %s", self.device, self.status.value, self.reason)
            self._events.broken()
