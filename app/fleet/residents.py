"""Models on demand: running workers load them beside the others, and unload them for others on demand.

    a request ─► ask ─► app.scheduling.residency says what goes and what comes ─► LoadModel, UnloadModel ─► workers
                  └─ not before its deadline: MODEL_LOADING

A new worker, after a crash or a hand-over, begins without these models. It loads again the ones that were there, so
that two workers of a device never hold two sets. Everything here runs in the event loop's thread.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from app import clock
from app.core import Loaded
from app.errors import ServiceError
from app.fleet.process import WorkerProcess
from app.fleet.profiles import Footprint, in_words
from app.fleet.submission import ModelPool
from app.observability.metrics import Metrics
from app.scheduling.residency import Place, Residency, Tenant
from app.scheduling.scheduler import Scheduler
from app.worker.messages import LoadModel, ModelUnloaded, NotLoaded, UnloadModel
from models.contract.errors import WeightsError
from models.weights.opened import mend

_LOOK_INTERVAL_S = 0.1
"""Interval of looks while a request waits for a model that cannot be loaded yet."""
_LONGEST_RETRY_S = 60
_LEAST_LOAD_S, _LOADS = 30.0, 10
"""Limits of a load: this time, and so many times its known time. A longer load is given up with its worker. The next
one has twice the time: engines may have to be compiled again.
"""

log = logging.getLogger("anychip.residents")


class Residents:
    """The models of `pools`, which are loaded on demand; `workers` are the fleet's, by id."""

    def __init__(
        self,
        pools: Sequence[ModelPool],
        scheduler: Scheduler[Any],
        workers: Mapping[str, WorkerProcess],
        metrics: Metrics,
        *,
        changed: Callable[[], None],
        refuse: Callable[[str, str], None],
        load_timeout_s: float,
    ) -> None:
        """Keep the callbacks. `changed`: a worker has loaded or unloaded; `refuse`: fail a model's items, with why."""
        self._pools = {pool.model.name: pool for pool in pools}
        self._pool_of = {name: pool for pool in pools for name in pool.names}
        self.names = frozenset(self._pool_of)
        """Names of the models on demand, and of their forms."""
        self._by_index = {form.index: pool for pool in pools for form in pool.forms}
        self._scheduler, self._workers, self._metrics = scheduler, workers, metrics
        self._changed, self._refuse, self._load_timeout_s = changed, refuse, load_timeout_s
        self._policy = Residency(0, [Tenant(name, 0, math.inf) for name in self._pools])
        self._asked: dict[WorkerProcess, list[int]] = {}  # Models that workers load, the next one first.
        self._leaving: dict[WorkerProcess, set[int]] = {}
        self._not_there: set[str] = set()  # Models that leave after a failed load.
        self._stirred = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._failure = ""
        self._stopped = False
        self._begun = False  # True once the memory of each model is known.
        self._deaths: Counter[str] = Counter()  # Workers in a row that ended while they loaded it.
        self._patience: Counter[str] = Counter()  # Loads in a row during which their worker ended.
        self._draining: set[str] = set()  # Models that leave once no batch of theirs is in flight.
        for name in self._pools:
            for outcome in ("loaded", "failed", "unloaded"):
                metrics.model_loads.labels(name, outcome)

    def workers(self) -> list[WorkerProcess]:
        """Return the workers that may have such models and are not about to end."""
        return [each for each in self._workers.values() if self._takes(each) and each.is_ready]

    def _takes(self, worker: WorkerProcess) -> bool:
        return all(worker.plan.has(index) for index in self._by_index)

    def stop(self) -> None:
        """End the timer. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
        self._stopped = True

    async def begin(self, budget_bytes: int, known: Mapping[str, Footprint]) -> str:
        """Find the memory that each model takes: from earlier measurements, else by loading it once.

        Returns why the service cannot serve them so, empty if it can. To be called once workers are ready. A load whose
        worker ends is tried again with the next one, until there is no next one soon.
        """
        self._policy.budget_bytes = budget_bytes
        for name, pool in self._pools.items():
            tenant = self._policy.tenants[name]
            measured = [known[form] for form in pool.names if form in known]
            if len(measured) == len(pool.forms):
                tenant.memory_bytes = sum(each.memory_bytes for each in measured)
                tenant.load_s = sum(each.load_s for each in measured)
            else:
                log.info("%s is loaded, to know what it takes", name)
                for _ in range(2):  # The first load may compile, and compilers leave memory behind.
                    tenant.place, tenant.since_s, self._failure = Place.LOADING, clock.monotonic(), ""
                    await self._until(tenant, Place.RESIDENT)
                    if tenant.place is Place.RESIDENT:
                        self._go(name)
                        await self._until(tenant, Place.ABSENT)
                    if self._failure:
                        return f"{name} cannot be loaded: {self._failure}"
            if tenant.memory_bytes > budget_bytes:
                takes, budget = in_words(tenant.memory_bytes), in_words(budget_bytes)
                return f"{name} takes {takes} of the device's memory, and models on demand may have {budget}"
        self._begun = True
        total = sum(each.memory_bytes for each in self._policy.tenants.values())
        log.info("models on demand take %s together and may have %s", in_words(total), in_words(budget_bytes))
        return ""

    async def _until(self, tenant: Tenant, place: Place) -> None:
        while tenant.place is not place and not self._failure:
            self._stirred.clear()
            self._step()
            await self._stirred.wait()

    def ask(self, name: str, deadline_s: float, client: str = "") -> None:
        """Let a client ask for a model, or a form of it. Raises MODEL_LOADING if it is not there by the deadline."""
        pool = self._pool_of.get(name)
        if pool is None:
            return
        now_s, shown = clock.monotonic(), pool.model.name
        if not self._begun:
            raise _loading(shown, math.inf)
        expected_s = self._policy.ask(shown, now_s, lambda other: other == shown or self._is_busy(other), client)
        if expected_s:
            # After this request has entered its queue, in this turn of the loop; a client that is refused will
            # come again.
            asyncio.get_running_loop().call_soon(self._step)
            if now_s + expected_s > deadline_s and not self._scheduler.serving[name]:  # Another worker may have it.
                pool.metrics.rejected["loading"].inc()
                raise _loading(shown, expected_s)

    def late(self, name: str) -> ServiceError | None:
        """Return the error for a deadline that passes while the model loads; None if it is served or not on demand."""
        pool = self._pool_of.get(name)
        if pool is None or self._scheduler.serving[name]:
            return None
        tenant = self._policy.tenants[pool.model.name]
        return _loading(tenant.name, tenant.load_s)

    def worker_ready(self) -> None:
        """Load the models again: a new worker serves none of them yet."""
        now_s = clock.monotonic()
        self._policy.begun_anew(now_s, self._is_busy)
        for tenant in self._policy.placed(Place.RETURNING):
            if self._pools[tenant.name].unloaded:  # By the administration: the new worker has none of it.
                self._policy.left(tenant.name, now_s)
        self._stirred.set()
        self._step()

    async def worker_there(self) -> str:
        """Wait for a worker that may have such models; return why there is none soon, empty if there is one."""
        while not self.workers() and not self._failure:
            self._stirred.clear()
            await self._stirred.wait()
        return self._failure

    def give_up(self, reason: str) -> None:
        """Measure no more if workers keep ending, so that none is started again soon."""
        if not self._begun:
            self._failure = reason
            self._stirred.set()

    def worker_gone(self, worker: WorkerProcess, reason: str) -> None:
        """Handle a worker's end, with its reason. The model it was loading may be to blame: after two ends it is not
        loaded at once. While models are measured it is, as nobody waits for another one.
        """
        self._leaving.pop(worker, None)
        asked = self._asked.pop(worker, [])
        if asked and worker.has_failed:
            pool = self._by_index[asked[0]]
            log.warning("the worker ended while %s was loaded: %s", pool.model.name, reason)
            self._deaths[pool.model.name] += 1
            self._patience[pool.model.name] += 1
            if self._deaths[pool.model.name] > 1 and self._begun:
                self._failed(pool, f"the worker ended while it was loaded: {reason}")
        self._settle()
        self._stirred.set()
        self._step()

    def received(self, worker: WorkerProcess, message: Loaded | NotLoaded | ModelUnloaded) -> None:
        """Handle a worker's report that it has loaded or unloaded a model."""
        index, pool = message.model, self._by_index[message.model]
        if isinstance(message, ModelUnloaded):
            self._leaving[worker].discard(index)
        else:
            self._asked[worker].remove(index)
            if isinstance(message, NotLoaded):
                self._failed(pool, message.reason)
            elif self._policy.tenants[pool.model.name].place is not Place.LOADING:
                self._unload(worker, index)  # Another worker could not load it.
            else:
                form = next(form for form in pool.forms if form.index == index)
                worker.loaded[index] = message
                self._scheduler.serve_model(worker.name, form.model.name, message.latency_s, message.depth)
        self._settle()
        self._changed()
        self._stirred.set()
        self._step()

    def _failed(self, pool: ModelPool, reason: str) -> None:
        name = pool.model.name
        log.error("%s could not be loaded: %s", name, reason)
        mending = asyncio.get_running_loop().run_in_executor(None, _mend, pool)
        mending.add_done_callback(partial(_replace_confined, self.workers, name))
        self._failure = reason
        self._metrics.model_loads.labels(name, "failed").inc()
        self._deaths.pop(name, None)
        self._policy.failed(name, clock.monotonic())
        self._not_there.add(name)
        self._go(name)
        for form in pool.names:
            self._refuse(form, f"{name} could not be loaded")

    def _go(self, name: str) -> None:
        """Have every worker unload a model, once no batch of it is in flight. Its queued items stay queued."""
        self._policy.tenants[name].place = Place.LEAVING
        held = [
            (worker, form)
            for worker in self.workers()
            for form in self._pools[name].forms
            if form.index in worker.loaded
        ]
        for worker, form in held:
            self._scheduler.serve_model(worker.name, form.model.name, None)
        if any(self._scheduler.queues[form].in_flight for form in self._pools[name].names):
            self._draining.add(name)
            return
        self._draining.discard(name)
        for worker, form in held:
            del worker.loaded[form.index]
            self._unload(worker, form.index)

    def _unload(self, worker: WorkerProcess, index: int) -> None:
        self._leaving.setdefault(worker, set()).add(index)
        worker.send(UnloadModel(index))

    def _settle(self) -> None:
        now_s = clock.monotonic()
        for tenant in self._policy.placed(Place.LEAVING):
            indices = {form.index for form in self._pools[tenant.name].forms}
            busy = [*self._leaving.values(), *map(set, self._asked.values())]
            if tenant.name not in self._draining and not any(indices & each for each in busy):
                self._policy.left(tenant.name, now_s)
                if tenant.name in self._not_there:
                    self._not_there.remove(tenant.name)
                else:
                    self._metrics.model_loads.labels(tenant.name, "unloaded").inc()
        for tenant in self._policy.placed(Place.LOADING):
            held = [_measured(worker, self._pools[tenant.name]) for worker in self.workers()]
            if held and all(held):
                memory = max(sum(each.memory_bytes for each in forms) for forms in held)
                load_s = max(sum(each.load_s for each in forms) for forms in held)
                self._policy.loaded(tenant.name, now_s, memory, load_s)
                self._deaths.pop(tenant.name, None)
                self._patience.pop(tenant.name, None)
                self._metrics.model_loads.labels(tenant.name, "loaded").inc()
                log.info("%s is loaded: %s in %.2f s", tenant.name, in_words(memory), load_s)

    def _step(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._stopped:
            return
        now_s, serving = clock.monotonic(), self.workers()
        if serving and len(serving) == sum(map(self._takes, self._workers.values())):
            leave, _ = self._policy.next(now_s, self._is_busy)
            for name in {*leave, *self._draining}:
                self._go(name)
            self._settle()
            for tenant in self._policy.placed(Place.LOADING):
                for worker in serving:
                    self._tell(worker, self._pools[tenant.name], now_s - tenant.since_s)
        returning = self._policy.placed(Place.RETURNING)
        if returning or self._policy.waiting(now_s, self._is_busy) or self._draining or any(self._asked.values()):
            self._timer = asyncio.get_running_loop().call_later(_LOOK_INTERVAL_S, self._step)

    def _tell(self, worker: WorkerProcess, pool: ModelPool, since_s: float) -> None:
        asked = self._asked.setdefault(worker, [])
        for form in pool.forms:
            if form.index not in asked and form.index not in worker.loaded:
                asked.append(form.index)
                worker.send(LoadModel(form.index))
        name = pool.model.name
        known_s = max(_LEAST_LOAD_S, _LOADS * self._policy.tenants[name].load_s)
        limit_s = min(self._load_timeout_s, known_s * 2 ** self._patience[name])
        if asked and self._by_index[asked[0]] is pool and since_s > limit_s:
            reason = f"it was not loaded within {limit_s:g} s"
            self.give_up(reason)
            worker.kill(f"{name}: {reason}")

    def _is_busy(self, name: str) -> bool:
        pool = self._pools[name]
        queues = self._scheduler.queues
        return bool(pool.images_under_way) or any(queues[form].in_flight or queues[form].depth for form in pool.names)


def _mend(pool: ModelPool) -> bool:
    """Make damaged copies of a model's files again, for its next load. Return True if some were damaged."""
    files = pool.model.files
    try:
        return files is not None and mend(files)
    except WeightsError as error:
        log.error("%s: %s", pool.model.name, error)
        return False


def _replace_confined(workers: Callable[[], list[WorkerProcess]], name: str, mended: asyncio.Future[bool]) -> None:
    """Replace workers that are confined to the files that were there when they began, once a copy was made again."""
    if mended.cancelled() or not mended.result():
        return
    for worker in workers():
        if worker.plan.confined:
            worker.kill(f"the copy of {name} was made again, and it may read the old one only")


def _measured(worker: WorkerProcess, pool: ModelPool) -> list[Loaded]:
    held = [worker.loaded[form.index] for form in pool.forms if form.index in worker.loaded]
    return held if len(held) == len(pool.forms) else []


def _loading(name: str, expected_s: float) -> ServiceError:
    seconds = max(1, math.ceil(min(expected_s, _LONGEST_RETRY_S)))
    if math.isinf(expected_s):
        message = f"{name} is not loaded: what each model takes of the memory is still being measured; try again"
    else:
        message = f"{name} is not loaded, and cannot be before the deadline; try again"
    return ServiceError("MODEL_LOADING", message, retry_after_s=seconds)
