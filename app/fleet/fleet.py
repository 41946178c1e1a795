"""Models on workers: the workers, what each serves, and what is handed to them.

app.fleet.dispatcher owns the outcome of items. All runs in the event loop's thread, so nothing needs a lock.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from app.config import Settings
from app.config.values import memory_of
from app.core import Loaded
from app.errors import ServiceError
from app.fleet import profiles as kept
from app.fleet.device_metrics import DeviceMetrics, ServedStates
from app.fleet.dispatcher import Dispatcher
from app.fleet.handover import Handovers
from app.fleet.plans import has_own_workers, how_served, memories, worker_devices, worker_plans
from app.fleet.process import Replica, WorkerProcess
from app.fleet.profiles import Profile
from app.fleet.residents import Residents
from app.fleet.submission import ModelPool, Submission
from app.link import ModelState, ReturnedBytes
from app.observability.metrics import Metrics
from app.observability.tracing import Tracing
from app.prepared import CONFINED
from app.processes.arena import Arena
from app.processes.fork_server import discard_prepared
from app.processes.place import ChildStartError, PlaceStatus
from app.scheduling.scheduler import Scheduler
from app.worker.messages import (
    DEVICE_RATIO,
    LARGEST_BATCH,
    Failed,
    FromWorker,
    HandOver,
    ModelUnloaded,
    NotLoaded,
    Released,
    Stats,
)
from backends import Choice
from models import Model, NormalisedModel

log = logging.getLogger("anychip.dispatcher")


_WITHOUT = (PlaceStatus.BROKEN, PlaceStatus.QUARANTINED, PlaceStatus.STOPPED)
"""Replicas without a worker and without one that starts soon."""
_GIVEN_UP = (PlaceStatus.BROKEN, PlaceStatus.QUARANTINED)


class Readiness:
    """The states of all models. `replicas` may still grow."""

    def __init__(self, models: Mapping[str, ModelPool], scheduler: Scheduler[Any], replicas: Sequence[Replica]) -> None:
        self._models, self._scheduler, self._replicas = models, scheduler, replicas
        self.on_demand: Collection[str] = ()
        """Names of the models that are loaded on demand, and of their forms."""

    def state(self, name: str) -> ModelState:
        """Return the state of a model, or of one of its forms."""
        if self.is_served(name):
            return ModelState.READY
        if self._models[name].shown.unloaded:
            return ModelState.UNLOADED
        if name in self.on_demand and any(each.child.is_ready for each in self._replicas_of(name)):
            return ModelState.ON_DEMAND
        starting = any(each.status not in _WITHOUT for each in self._replicas_of(name))
        return ModelState.STARTING if starting else ModelState.UNAVAILABLE

    def is_served(self, name: str) -> bool:
        """Return True if the state is READY: a worker takes requests. It costs less than to find the state."""
        return bool(self._scheduler.serving[name]) and not self._models[name].shown.unloaded

    def refuse_unless_served(self, name: str) -> None:
        """Raise NOT_READY if no worker serves the model and none is being started for it."""
        if self.is_served(name):
            return
        state = self.state(name)
        if not state.accepts_requests:
            self._models[name].metrics.rejected["not_ready"].inc()
            retry_after_s = 60 if state is ModelState.UNLOADED else 1
            raise ServiceError("NOT_READY", self.reason(name), retry_after_s=retry_after_s)

    def reason(self, name: str) -> str:
        """Return why the model is not ready, in one sentence; empty if it is."""
        state = self.state(name)
        if state.is_ready:
            return ""
        if state is ModelState.UNLOADED:
            shown = self._models[name].shown
            lost, load = shown.lost and f": {shown.lost}", f"POST /v2/repository/models/{shown.model.name}/load"
            return f"{shown.model.name} is unloaded{lost}; {load} loads it"
        return f"no worker is ready for {name}: {reasons_of(self._replicas_of(name))}"

    def loaded(self, names: Sequence[str]) -> list[str]:
        """Return the names whose model a worker has loaded; that worker may not be ready yet."""
        return [name for name in names if any(self._models[name].shown.index in each.loaded for each in self._replicas)]

    def _replicas_of(self, name: str) -> list[Replica]:
        index = self._models[name].shown.index
        return [each for each in self._replicas if each.plan.has(index)]


def reasons_of(replicas: Sequence[Replica]) -> str:
    """Return what is wrong with the replicas that have no worker; empty if nothing is known."""
    return "; ".join(f"{each.device} is {each.status.value}: {each.reason}" for each in replicas if each.reason)


class Fleet:
    """The workers and what they share; made, started and stopped inside one running event loop."""

    def __init__(
        self,
        settings: Settings,
        choice: Choice,
        models: Sequence[Model],
        metrics: Metrics,
        tracing: Tracing | None,
        *,
        spare_slots: int = 0,
        profiles: Mapping[str, Profile] | None = None,
    ) -> None:
        """Make the parts. `spare_slots`: beyond those of images that wait or run. `profiles`: of models, by name."""
        self._profiles = profiles or {}
        devices = worker_devices(settings, choice)
        # Two batches a worker, and twice as many workers while they hand over.
        served_with = [how_served(settings, self._profiles, model) for model in models]
        largest = max(LARGEST_BATCH if how.grows else how.batch_sizes[-1] for how in served_with)
        slots = settings.queue_size + 2 * largest * 2 * len(devices) + spare_slots
        self.models = {model.name: ModelPool(index, model, slots, metrics) for index, model in enumerate(models)}
        for pool in self.models.values():
            if isinstance(pool.model, NormalisedModel):
                self.models[pool.model.image_model.name].add_form(pool)
        self.scheduler: Scheduler[Submission] = Scheduler(
            dict.fromkeys(self.models, settings.queue_size), settings.max_wait_ms / 1e3
        )
        self.arena = Arena([(math.prod(model.input_shape), slots) for model in models], memories(choice, models))
        self.replicas: list[Replica] = []
        self.readiness = Readiness(self.models, self.scheduler, self.replicas)
        self._settings, self._choice, self._metrics = settings, choice, metrics
        self._device_metrics = {device: DeviceMetrics(metrics, device, choice.vendor) for device in choice.devices}
        self._served_states = ServedStates(metrics)
        self._workers: dict[str, WorkerProcess] = {}
        self.handovers = Handovers(self.replicas, settings, metrics, self._keep_sizes)
        self.dispatcher = Dispatcher(
            self.scheduler,
            self.models,
            self._workers,
            arena=self.arena,
            metrics=metrics,
            tracing=tracing,
            refuse_unless_served=self.readiness.refuse_unless_served,
        )
        self.worker_computed = self.dispatcher.computed
        for pool in self.models.values():
            if not isinstance(pool.model, NormalisedModel):
                self._watch(pool)
        self.residents = Residents(
            [
                pool
                for pool in self.models.values()
                if settings.is_on_demand(pool.model.name) and not has_own_workers(choice, pool.model)
            ],
            self.scheduler,
            self._workers,
            metrics,
            changed=self._membership_changed,
            refuse=self.dispatcher.refuse_waiting,
            load_timeout_s=settings.start_timeout_s,
        )
        self.readiness.on_demand = self.residents.names

    def _watch(self, pool: ModelPool) -> None:
        queues = [self.scheduler.queues[name] for name in pool.names]
        pool.metrics.queue_depth.set_function(lambda: sum(queue.depth for queue in queues))
        pool.metrics.queue_reserved.set_function(lambda: sum(queue.reserved for queue in queues))
        pool.metrics.queue_limit.set(self._settings.queue_size * len(pool.names))
        pool.metrics.images_in_flight.set_function(lambda: pool.images_under_way)
        pool.metrics.slots_taken.set_function(lambda: pool.slots_taken)

    async def start(self) -> None:
        """Start a worker for every replica and wait until all are ready. Raises ChildStartError."""
        models = [pool.model for pool in self.models.values()]
        plans = worker_plans(self._settings, self._choice, models, self._profiles)
        if not any(plan.confined for _, plan in plans):
            discard_prepared(CONFINED)
        for device, plan in plans:
            self.replicas.append(Replica(device, plan, self.arena, self))
        await asyncio.gather(*(replica.wait_ready() for replica in self.replicas))
        if self.residents.names:
            await self._begin_residents()

    async def _begin_residents(self) -> None:
        models = [pool.model for name, pool in self.models.items() if name in self.residents.names]
        known = await asyncio.to_thread(kept.footprints, self._settings, self._choice, models)
        if reason := await self.residents.worker_there():
            raise ChildStartError(reason)
        each, budgets = self._settings.workers_per_device, []
        for worker in self.residents.workers():
            assert worker.stats is not None
            total, policy = worker.stats.total, worker.plan.guard
            if not total:
                raise ChildStartError(f"{worker.device} does not say its memory, which models on demand are to share")
            pinned = sum(held.memory_bytes for held in worker.loaded.values())
            given = memory_of(self._settings.device_memory, total)
            free = int((policy if isinstance(policy, float) else DEVICE_RATIO) * total) - worker.stats.used
            budgets.append(free // each if given is None else given // each - pinned)
            self._metrics.model_memory_budget_bytes.labels(worker.device).set((budgets[-1] + pinned) * each)
        if reason := await self.residents.begin(min(budgets), known):
            raise ChildStartError(reason)

    def _keep_sizes(self, device: str, sizes: Mapping[int, tuple[int, ...]]) -> None:
        """Keep the batch sizes that a worker has found, by the model's number, for the next start. Not for the loop."""
        if device != self._choice.device(self._choice.devices[0]).name:
            return  # Profiles are of the first device.
        for pool in self.models.values():
            if pool.index in sizes:
                try:
                    kept.store_sizes(sizes[pool.index], self._settings, self._choice, pool.model)
                except OSError as error:
                    log.warning("the batch sizes found for %s cannot be kept: %s", pool.model.name, error)

    async def stop(self) -> None:
        """Stop every worker; what is still in flight has no outcome. Idempotent."""
        self.dispatcher.stop()
        self.residents.stop()
        await self.handovers.stop()
        await asyncio.gather(*(replica.stop() for replica in self.replicas))
        self.arena.close()

    def workers(self) -> list[WorkerProcess]:
        """Return the workers that are ready."""
        return list(self._workers.values())

    def loaded(self, pool: ModelPool) -> list[Loaded]:
        """Return how each ready worker serves the model."""
        return [worker.loaded[pool.index] for worker in self.workers() if pool.index in worker.loaded]

    async def hand_over(self, models: Sequence[Model | None], reason: str) -> None:
        """Replace every worker by one that serves `models`, all at the same moment: in the same order, None for one to
        unload. Items that wait for an unloaded model are refused.

        Raises ChildStartError if a new worker cannot start: nothing has changed then.
        """
        await self.handovers.to(tuple(models), reason)
        for (name, pool), model in zip(self.models.items(), models, strict=True):
            if model is not None:
                pool.model = model
            else:
                self.dispatcher.refuse_waiting(name, f"{name} was unloaded")

    async def release(self, device: str) -> dict[str, ReturnedBytes]:
        """Have every worker of a device release cached memory; return bytes by worker, once all have.

        A worker does it after the batches it has. One that ends meanwhile has returned nothing.
        """
        asked = [each for each in self.workers() if each.device == device]
        returned = await asyncio.gather(*(asyncio.shield(each.release()) for each in asked))
        return {worker.name: each for worker, each in zip(asked, returned, strict=True)}

    def worker_ready(self, worker: WorkerProcess) -> None:  # noqa: D102
        self._workers[worker.name] = worker
        loaded = {name: worker.loaded[pool.index] for name, pool in self.models.items() if pool.index in worker.loaded}
        self.scheduler.add_worker(
            worker.name,
            {name: each.latency_s for name, each in loaded.items()},
            {name: each.depth for name, each in loaded.items()},
        )
        self._device_metrics[worker.device].ready()
        self._leave_out(worker)
        self._membership_changed()
        log.info("%s is ready: %s", worker.name, worker.plan.device.name)
        self._keep_in_background(worker, [*loaded.values()])
        self.residents.worker_ready()
        if worker.is_provisional:
            self.handovers.compile(worker)

    def _leave_out(self, worker: WorkerProcess) -> None:
        """Unload what no worker has any more because its files are lost: others are served without it."""
        if not worker.left_out:
            return
        for replica in self.replicas:
            if replica.child is worker:
                replica.plan = worker.plan
        for name, pool in self.models.items():
            lost = worker.left_out.get(pool.index)
            if lost and not self.scheduler.serving[name] and not isinstance(pool.model, NormalisedModel):
                pool.unloaded, pool.lost = True, lost
                log.error("%s is unloaded: %s", name, lost)
                for form in pool.names:
                    self.dispatcher.refuse_waiting(form, self.readiness.reason(name))

    def worker_retires(self, worker: WorkerProcess) -> None:  # noqa: D102
        self.scheduler.retire_worker(worker.name)

    def _keep_in_background(self, worker: WorkerProcess, loaded: Sequence[Loaded]) -> None:
        asyncio.get_running_loop().run_in_executor(
            None, kept.keep_footprints, worker, loaded, self._settings, self._choice
        )

    def _membership_changed(self) -> None:
        self._served_states.show(self._workers.values())
        self.dispatcher.files.workers_changed()
        self.dispatcher.dispatch_soon()

    def worker_reported(self, worker: WorkerProcess, message: FromWorker) -> None:  # noqa: D102
        match message:
            case Failed():
                self.dispatcher.failed(worker, message)
            case Stats():
                self._device_metrics[worker.device].report(worker.name, message)
            case Released():
                self._device_metrics[worker.device].released(message)
                if message.trigger == "request":
                    worker.released(message.returned, message.host)
            case Loaded() | NotLoaded() | ModelUnloaded():
                self.residents.received(worker, message)
                if isinstance(message, Loaded):
                    self._keep_in_background(worker, [message])
            case HandOver():
                self.handovers.relieve(worker, message.trigger)

    def worker_gone(self, worker: WorkerProcess, reason: str) -> None:  # noqa: D102
        self._workers.pop(worker.name, None)
        worker.released({}, {})  # It has returned nothing.
        last = not any(other.device == worker.device for other in self._workers.values())
        self._device_metrics[worker.device].gone(worker.name, last=last)
        self._membership_changed()
        self.dispatcher.gone(worker, reason)
        self.residents.worker_gone(worker, reason)

    def worker_lost(self, replica: Replica, kind: str) -> None:  # noqa: D102
        self._metrics.worker_restarts.labels(replica.device, kind).inc()
        if replica.status not in _GIVEN_UP:
            return
        log.error("%s is %s: %s", replica.device, replica.status.value, replica.reason)
        self.residents.give_up(replica.reason)
        for name in self.models:
            if not self.readiness.state(name).accepts_requests:
                self.dispatcher.refuse_waiting(name, f"no worker is left for {name}")
