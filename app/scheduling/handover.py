"""Workers that take over from others while these serve: for new weights, for memory, for engines that took their time.

Owns: when a place's worker is replaced, one place at a time, and the tasks that wait for the moment. How a replica
hands over is its own business (app.workers.replica). Must not know requests.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Sequence
from dataclasses import replace

from app.config import Settings
from app.observability.metrics import Metrics
from app.workers.guard import HAND_OVER
from app.workers.process import WorkerProcess, WorkerStartError
from app.workers.replica import Replica
from models import Model

_RELIEVE_INTERVAL_S = 0.25

log = logging.getLogger("anychip.dispatcher")


class Handovers:
    """Of `replicas`, a list that may still grow."""

    def __init__(self, replicas: Sequence[Replica], settings: Settings, metrics: Metrics) -> None:
        self._replicas, self._settings, self._metrics = replicas, settings, metrics
        self._lock = asyncio.Lock()
        self._relieved: dict[Replica, asyncio.Task[None]] = {}
        self._relieved_s: dict[str, float] = {}
        self._compiling: set[asyncio.Task[None]] = set()

    async def stop(self) -> None:
        """End every task. Idempotent."""
        background = [*self._relieved.values(), *self._compiling]
        for task in background:
            task.cancel()
        await asyncio.gather(*background, return_exceptions=True)

    async def to(self, models: tuple[Model | None, ...], reason: str) -> None:
        """Replace every worker, one after the other, by one that serves `models`.

        Raises WorkerStartError when a new worker cannot start: that replica and those after it stay as they are.
        """
        async with self._lock:
            for replica in self._replicas:
                plan = replace(replica.plan, load=replace(replica.plan.load, models=models))
                await replica.hand_over(plan, self._settings.drain_s)
                self._metrics.handovers.labels(replica.device, reason).inc()

    def relieve(self, worker: WorkerProcess, trigger: str) -> None:
        """Replace a worker that leaks, as soon as that is allowed."""
        replica = self._of(worker)
        if replica is None or replica in self._relieved:
            return
        log.warning("%s holds memory that no release returns (%s): it will be replaced", worker.id, trigger)
        task = asyncio.create_task(self._relieve(replica, worker, trigger), name=f"relieve {worker.id}")
        self._relieved[replica] = task
        task.add_done_callback(lambda _: self._relieved.pop(replica, None))

    def compile(self, worker: WorkerProcess) -> None:
        """Replace a worker that serves with what was ready in seconds by one that takes its time."""
        task = asyncio.create_task(self._compile(worker), name=f"compile for {worker.id}")
        self._compiling.add(task)
        task.add_done_callback(self._compiling.discard)

    def _of(self, worker: WorkerProcess) -> Replica | None:
        return next((each for each in self._replicas if each.current is worker), None)

    async def _relieve(self, replica: Replica, worker: WorkerProcess, trigger: str) -> None:
        """Replace a leaking worker as soon as that takes nobody away from those that serve."""
        while replica.current is worker:
            async with self._lock:
                ago_s = time.monotonic() - self._relieved_s.get(replica.device, -math.inf)
                allowed = ago_s >= self._settings.guard_handover_interval_s
                if allowed and replica.current is worker and all(each.state == "ready" for each in self._replicas):
                    try:
                        await replica.hand_over(replica.plan, self._settings.drain_s)
                        self._metrics.cache_releases.labels(replica.device, HAND_OVER, trigger).inc()
                        self._metrics.handovers.labels(replica.device, "memory").inc()
                    except WorkerStartError as error:
                        log.error("%s: no worker could take over from one that leaks: %s", replica.device, error)
                    finally:
                        self._relieved_s[replica.device] = time.monotonic()
            await asyncio.sleep(_RELIEVE_INTERVAL_S)

    async def _compile(self, worker: WorkerProcess) -> None:
        async with self._lock:
            replica = self._of(worker)
            if replica is None:
                return
            plan = replace(replica.plan, load=replace(replica.plan.load, quick=False))
            log.info("%s serves meanwhile; the faster engines are being compiled", worker.id)
            try:
                await replica.hand_over(plan, self._settings.drain_s)
                self._metrics.handovers.labels(replica.device, "compiled").inc()
            except WorkerStartError as error:
                log.error("%s: the faster engines cannot be had, what serves stays: %s", replica.device, error)
