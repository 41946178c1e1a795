"""Hand-overs: workers replace others that still serve, for new weights, for memory, or for engines slow to build.

One at a time; they go on after their caller is gone. app.processes.place owns how workers start, swap and drain.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from app import clock
from app.config import Settings
from app.errors import shutting_down
from app.fleet.process import Replica, WorkerProcess
from app.observability.metrics import Metrics
from app.processes.place import ChildStartError, PlaceStatus
from app.worker.messages import HAND_OVER, WorkerPlan
from models import Model

_RELIEVE_INTERVAL_S = 0.25
_HANDOVER_INTERVAL_S = 10.0
"""Least time between two hand-overs of a device for its memory."""
_COMPILE_TIMEOUT_S = 3600.0
# Pauses before tries in a row to compile for a replica; a compiled worker that outlives the last one ends the row.
_COMPILE_PAUSES_S = (0.0, 30.0, 120.0, 600.0)

T = TypeVar("T")

log = logging.getLogger("anychip.dispatcher")


class Handovers:
    """Hand-overs of the workers of `replicas`, a list that may still grow."""

    def __init__(
        self,
        replicas: Sequence[Replica],
        settings: Settings,
        metrics: Metrics,
        keep_sizes: Callable[[str, Mapping[int, tuple[int, ...]]], None] = lambda device, sizes: None,
    ) -> None:
        """Keep `keep_sizes`: called in a thread with a device's name and the sizes a compiled worker found on it."""
        self._replicas, self._settings, self._metrics = replicas, settings, metrics
        self._keep_sizes = keep_sizes
        self._sizes: dict[str, dict[int, tuple[int, ...]]] = {}  # By the device's name: cards of one kind are alike.
        self._lock = asyncio.Lock()
        self._relieved: dict[Replica, asyncio.Task[None]] = {}
        self._relieved_s: dict[str, float] = {}
        self._compiling: dict[Replica, asyncio.Task[None]] = {}
        self._compilations: dict[Replica, tuple[int, float]] = {}  # Count of tries in a row, and the start of the last.
        self._tasks: set[asyncio.Task[Any]] = set()
        self._stopped = False

    async def stop(self) -> None:
        """End every task, and begin no other. Idempotent."""
        self._stopped = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def run(self, change: Coroutine[Any, Any, None]) -> None:
        """Run a change of the models in a task of its own: a client that leaves must not leave half a change behind.

        Raises DRAINING if `stop` ended it.
        """
        if self._stopped:
            change.close()
            raise shutting_down()
        task = self._task(change, "change of models")
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                raise shutting_down() from None
            raise

    async def to(self, models: tuple[Model | None, ...], reason: str) -> None:
        """Replace every worker by one that serves `models`, all at the same moment.

        Each new worker starts beside the old one; the device needs memory for both. Raises ChildStartError if one of
        them cannot start: then none of them takes over.
        """
        for task in list(self._compiling.values()):
            task.cancel()  # Those of the old models. It may take an hour, and the new workers have their own.
        self._compiling.clear()
        try:
            await self._to(models, reason)
        finally:
            for each in self._replicas:
                if each.child.is_provisional:
                    self.compile(each.child)

    async def _to(self, models: tuple[Model | None, ...], reason: str) -> None:
        async with self._lock:
            plans = {each: each.plan.with_models(models) for each in self._replicas}
            # A replica whose workers keep dying would stop every hand-over; it follows the new plan when it is back.
            in_order = [each for each in plans if each.status not in (PlaceStatus.BROKEN, PlaceStatus.QUARANTINED)]
            served = {each.plan.serves for each in in_order}
            needed = [
                each
                for each, plan in plans.items()
                if each in in_order or (plan.serves not in served and plan.models != each.plan.models)
            ] or list(plans)
            workers = {each: each.worker(plan) if each in needed else None for each, plan in plans.items()}
            starts = {
                each: self._task(each.prepare(worker), f"prepare {each.device}") for each, worker in workers.items()
            }
            try:
                await asyncio.gather(*starts.values())
                for worker in workers.values():
                    if worker is not None and worker.over.done():
                        raise ChildStartError(worker.reason)
            except BaseException:
                for start in starts.values():
                    start.cancel()
                await asyncio.wait(starts.values())
                prepared = [each for each, start in starts.items() if not start.cancelled() and not start.exception()]
                await asyncio.gather(*(each.discard(workers[each]) for each in prepared))
                raise
            # In one turn of the event loop: no request gets new weights before another gets old ones.
            drains = [each.take_over(worker, self._settings.drain_s) for each, worker in workers.items()]
            for each in workers:
                each.plan = plans[each]
                self._metrics.handovers.labels(each.device, reason).inc()
            await asyncio.gather(*map(asyncio.shield, drains))

    def relieve(self, worker: WorkerProcess, trigger: str) -> None:
        """Replace a worker that leaks, as soon as that is allowed."""
        self._begin(self._relieved, worker, lambda replica: self._relieve(replica, worker, trigger))

    def compile(self, worker: WorkerProcess) -> None:
        """Replace a worker that serves with a quick first engine by one with compiled engines."""
        self._begin(self._compiling, worker, lambda replica: self._compile(replica, worker))

    def _begin(
        self,
        tasks: dict[Replica, asyncio.Task[None]],
        worker: WorkerProcess,
        work: Callable[[Replica], Coroutine[Any, Any, None]],
    ) -> None:
        replica = next((each for each in self._replicas if each.child is worker and worker.is_ready), None)
        if self._stopped or replica is None or replica in tasks:
            return
        task = tasks[replica] = self._task(work(replica), f"hand-over from {worker.name}")
        task.add_done_callback(lambda done: tasks.pop(replica) if tasks.get(replica) is done else None)

    def _task(self, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.debug("%s: %s", task.get_name(), task.exception())  # Its caller gets the error, too.

    async def _relieve(self, replica: Replica, worker: WorkerProcess, trigger: str) -> None:
        log.warning("%s holds memory that no release returns (%s): it will be replaced", worker.name, trigger)
        while worker.is_ready:
            async with self._lock:
                ago_s = clock.monotonic() - self._relieved_s.get(replica.device, -math.inf)
                allowed = ago_s >= _HANDOVER_INTERVAL_S
                others = [each for each in self._replicas if each.plan.serves == replica.plan.serves]
                if allowed and worker.is_ready and all(each.child.is_ready for each in others):
                    try:
                        # Like this worker: with compiled engines, if it has them.
                        successor = replica.worker(self._with_sizes(worker.plan.with_models(replica.plan.models)))
                        await replica.prepare(successor)
                        await asyncio.shield(replica.take_over(successor, self._settings.drain_s))
                        self._metrics.cache_releases.labels(replica.device, HAND_OVER, trigger).inc()
                        self._metrics.handovers.labels(replica.device, "memory").inc()
                    except ChildStartError as error:
                        log.error("%s: no worker could take over from one that leaks: %s", replica.device, error)
                    finally:
                        self._relieved_s[replica.device] = clock.monotonic()
            await asyncio.sleep(_RELIEVE_INTERVAL_S)

    async def _compile(self, replica: Replica, worker: WorkerProcess) -> None:
        """Compile until a compiled worker has taken over, or `worker` serves no more.

        The replica's own plan stays quick: after a crash it serves again in seconds, and compiles anew.
        """
        while worker.is_ready:
            tries, begun_s = self._compilations.get(replica, (0, -math.inf))
            if clock.monotonic() - begun_s > _COMPILE_PAUSES_S[-1] + _COMPILE_TIMEOUT_S:
                tries = 0
            await asyncio.sleep(_COMPILE_PAUSES_S[min(tries, len(_COMPILE_PAUSES_S) - 1)])
            async with self._lock:
                if not worker.is_ready:
                    return
                self._compilations[replica] = tries + 1, clock.monotonic()
                quick = self._with_sizes(replica.plan)
                plan = replace(quick, quick=False, start_timeout_s=_COMPILE_TIMEOUT_S)
                log.info("%s serves meanwhile; faster engines and larger batches are tried beside it", worker.name)
                try:
                    compiled = replica.worker(plan)
                    await replica.prepare(compiled)
                    grown = {index for index, each in enumerate(compiled.plan.plans) if each.grows}
                    found = {index: tuple(on.latency_s) for index, on in compiled.loaded.items() if index in grown}
                    self._sizes.setdefault(plan.device.name, {}).update(found)
                    drain = replica.take_over(compiled, self._settings.drain_s)
                    replica.plan = self._with_sizes(quick)
                except ChildStartError as error:
                    again_s = _COMPILE_PAUSES_S[min(tries + 1, len(_COMPILE_PAUSES_S) - 1)]
                    log.error(
                        "%s: nothing faster can be had, what serves stays; it is tried again in %g s: %s",
                        replica.device,
                        again_s,
                        error,
                    )
                    continue
                if found:
                    await asyncio.to_thread(self._keep_sizes, plan.device.name, found)
                await asyncio.shield(drain)
                self._metrics.handovers.labels(replica.device, "compiled").inc()
                return

    def _with_sizes(self, plan: WorkerPlan) -> WorkerPlan:
        """Return the plan with the batch sizes found meanwhile on such a device; they are not searched again."""
        found = self._sizes.get(plan.device.name, {})
        plans = tuple(
            replace(each, batch_sizes=found[index], grows=False) if index in found else each
            for index, each in enumerate(plan.plans)
        )
        return replace(plan, plans=plans)
