"""Between the queue and the workers: what is sent where, and what becomes of it.

    submit ─► enqueue ─► dispatch ─► Run ─► worker ─► Done ─► Outcome
                            ▲                  ├─ Failed, or it is gone: its items again, one by one, once
                            └── every event ◄──┘

Owns: the scheduler, the arena and its slots, the replicas, and every item until somebody has its outcome: no item is
lost and none answered twice. Must not know HTTP, encoded images or predictions. All of it runs in the event loop's
thread, so nothing here needs a lock.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from app import logs
from app.config import Settings, split
from app.errors import ServiceError
from app.observability.device_metrics import DeviceMetrics, ServedStates
from app.observability.metrics import Metrics, ModelMetrics
from app.observability.tracing import RequestTrace, Tracing
from app.observability.triton_statistics import Statistics
from app.precision.probes import calibration, probes
from app.scheduling.handover import Handovers
from app.scheduling.scheduler import Batch, Item, Reservation, Scheduler
from app.workers.arena import Arena, FreeSlots
from app.workers.messages import Done, Failed, HandOver, Load, Loaded, Release, Released, Run, Stats
from app.workers.replica import Events, Plan, Replica, WorkerProcess, discard_prepared
from backends import Choice
from models import Model, NormalisedModel, Options, TensorOptions

if TYPE_CHECKING:
    from opentelemetry.trace import SpanContext

log = logging.getLogger("anychip.dispatcher")


Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a worker made of one image: what `Model.reduce` returned, None where the network computed NaN. `batch`: the
    span of its batch, where it is traced.
    """

    result: tuple[Array, ...] | None
    worker: WorkerProcess
    infer_s: float
    batch: SpanContext | None = None


@dataclass(eq=False, slots=True)
class _Waiting:
    """An item's payload: where its pixels are, and who waits for them. `request_id` is for the log."""

    slot: int
    options: Options | TensorOptions
    future: asyncio.Future[Outcome]
    request_id: str
    trace: RequestTrace | None


class ServedModel:
    """A model and what belongs to it here. Its arena pool and its place in every `Load` have its `index`."""

    def __init__(self, index: int, model: Model, slots: int, metrics: Metrics) -> None:
        self.index = index
        self.model = model
        self.slots = FreeSlots(slots)
        self.metrics = ModelMetrics(metrics, model.name)
        self.statistics = Statistics()
        self.floats: ServedModel | None = None
        """The form of it that takes normalised tensors, where that is wanted; it counts as this one."""
        self.signature: tuple[Model, Any] | None = None
        """What app.protocols.open_inference has made of a model, and of which: kept, as every request asks for it."""
        self.unloaded = False
        """No worker holds it any more, or will soon; new requests are refused."""
        self.images = 0
        """Images accepted and not yet answered."""

    @property
    def images_under_way(self) -> int:
        """Images accepted and not yet answered, in any form."""
        return self.images + (self.floats.images if self.floats else 0)

    @property
    def names(self) -> tuple[str, ...]:
        """What the scheduler calls it, in every form."""
        return (self.model.name, self.floats.model.name) if self.floats else (self.model.name,)


class Dispatcher:
    """Models on workers. Made, started and stopped inside one running event loop."""

    def __init__(
        self, settings: Settings, choice: Choice, models: Sequence[Model], metrics: Metrics, tracing: Tracing | None
    ) -> None:
        devices = [device for device in choice.devices for _ in range(settings.workers_per_device)]
        # Two batches a worker, and twice as many workers while they hand over.
        in_flight = 2 * settings.ladder[-1] * 2 * len(devices)
        slots = settings.queue_size + in_flight
        self.models = {model.name: ServedModel(index, model, slots, metrics) for index, model in enumerate(models)}
        self.scheduler = Scheduler(dict.fromkeys(self.models, settings.queue_size), settings.max_wait_ms / 1e3)
        self.arena = Arena([(math.prod(model.input_shape), slots) for model in models])
        self.replicas: list[Replica] = []
        self._settings = settings
        self._choice = choice
        self._devices = devices
        self._metrics = metrics
        self._tracing = tracing
        self._device_metrics = {device: DeviceMetrics(metrics, device, choice.vendor) for device in choice.devices}
        self._served_states = ServedStates(metrics)
        self._workers: dict[str, WorkerProcess] = {}
        self._wake: asyncio.TimerHandle | None = None
        self._handovers = Handovers(self.replicas, settings, metrics)
        self._requests = itertools.count(1)
        self._releases: dict[tuple[WorkerProcess, int], asyncio.Future[dict[int, int]]] = {}
        for served in list(self.models.values()):
            if isinstance(served.model, NormalisedModel):
                shown = self.models[served.model.image_model.name]
                shown.floats = served
                served.metrics, served.statistics = shown.metrics, shown.statistics
            else:
                self._watch(served)

    def _watch(self, served: ServedModel) -> None:
        served.metrics.queue_depth.set_function(lambda: sum(map(self.scheduler.waiting, served.names)))
        served.metrics.queue_reserved.set_function(lambda: sum(map(self.scheduler.reserved, served.names)))
        served.metrics.queue_limit.set(self._settings.queue_size * len(served.names))
        served.metrics.images_in_flight.set_function(lambda: served.images_under_way)

    async def start(self) -> None:
        """Start a worker for every replica; returns when all are ready. Raises WorkerStartError."""
        settings = self._settings
        events = Events(
            self._worker_ready, self._worker_message, self._worker_retiring, self._worker_gone, self._worker_died,
            self._replica_broken,
        )  # fmt: skip
        models = tuple(served.model for served in self.models.values())
        gated = self._choice.backend.facts.computes
        tried = tuple(probes(model) for model in models) if gated else ()
        quantised = settings.precision == "int8"
        calibrations = tuple(calibration(model, settings.calibrate) for model in models) if quantised else ()
        for device in self._devices:
            load = Load(
                models=models,
                device=device,
                engine=settings.engine,
                precision=settings.precision,
                batch_sizes=settings.ladder,
                guard=settings.guard_limits,
                plugins=split(settings.plugins),
                operator_libraries=split(settings.operator_libraries),
                probes=tried,
                calibrations=calibrations,
                cache_dir=settings.cache_dir.expanduser(),
                quick=True,
            )
            plan = Plan(
                load,
                self._choice.backend.facts.variables(os.environ, settings.cache_dir.expanduser()),
                takes_prepared=self._choice.backend.facts.late_environment,
                start_timeout_s=settings.start_timeout_s,
                batch_timeout_s=settings.batch_timeout_s,
                heartbeat_timeout_s=settings.heartbeat_timeout_s,
                log_style=(settings.log_level, settings.log_format),
            )
            self.replicas.append(Replica(device, plan, self.arena, events))
        await asyncio.gather(*(replica.wait_ready() for replica in self.replicas))
        discard_prepared()

    async def stop(self) -> None:
        """Stop every worker; what is still under way has no outcome. Idempotent."""
        if self._wake is not None:
            self._wake.cancel()
        await self._handovers.stop()
        await asyncio.gather(*(replica.stop() for replica in self.replicas))
        self.arena.close()

    def serves(self, name: str) -> bool:
        """Whether a worker is ready for the model."""
        return self.scheduler.serves(name)

    def expects(self, name: str) -> bool:
        """Whether a worker is ready for the model, or will be soon."""
        return self.serves(name) or any(replica.state == "restarting" for replica in self.replicas)

    def workers(self) -> list[WorkerProcess]:
        """The workers that are ready."""
        return list(self._workers.values())

    def loaded(self, served: ServedModel) -> list[tuple[str, Loaded]]:
        """How each ready worker serves the model, with its device."""
        workers = [(worker.device, worker.ready) for worker in self._workers.values()]
        loaded = [(device, ready.loaded[served.index]) for device, ready in workers if ready]
        return [(device, each) for device, each in loaded if each]

    def why_not_ready(self) -> str:
        """What is the matter with the replicas that have no worker."""
        return "; ".join(f"{each.device} is {each.state}: {each.reason}" for each in self.replicas if each.reason)

    def retry_after_s(self, name: str) -> int:
        """Seconds until the queue has drained at the rate the workers show, at least one."""
        return max(1, math.ceil(min(self.scheduler.drain_time_s(name), 60.0)))

    def submit(
        self,
        reservation: Reservation,
        slot: int,
        options: Options | TensorOptions,
        position: int,
        trace: RequestTrace | None = None,
    ) -> Item:
        """Queue an item whose slot is filled; `outcome` must be awaited, it gives the slot back."""
        waiting = _Waiting(slot, options, asyncio.get_running_loop().create_future(), logs.request_id.get(), trace)
        item = self.scheduler.enqueue(reservation, waiting, time.monotonic(), position)
        self._dispatch()
        return item

    async def outcome(self, served: ServedModel, item: Item) -> Outcome:
        """What became of an item; its slot is free afterwards, or as soon as no device looks at it any more.

        Raises ServiceError: DEADLINE_EXCEEDED, INFERENCE_FAILED, NOT_READY. Cancelled, it leaves the queue at once.
        """
        future: asyncio.Future[Outcome] = item.payload.future
        timer = asyncio.get_running_loop().call_later(item.deadline_s - time.monotonic(), self._expire, item)
        try:
            return await future
        finally:
            timer.cancel()
            if self.scheduler.discard(item):
                served.slots.give(item.payload.slot)

    async def hand_over(self, models: Sequence[Model | None], reason: str) -> None:
        """Replace every worker, one after the other, by one that serves `models`: in the same order, None for one that
        is to be unloaded. What still waits for such a one is refused.

        Raises WorkerStartError when a new worker cannot start: that replica and those after it stay as they are.
        """
        await self._handovers.to(tuple(models), reason)
        for (name, served), model in zip(self.models.items(), models, strict=True):
            if model is not None:
                served.model = model
            else:
                self._refuse_waiting(name, f"{name} was unloaded")

    async def release(self, device: str | None = None) -> dict[str, dict[int, int]]:
        """Have every worker (of a device) give cached memory back; bytes by worker and rung, once all have.

        A worker does it after the batches it has; one that ends meanwhile has returned nothing here.
        """
        request = next(self._requests)
        workers = [worker for worker in self._workers.values() if device in (None, worker.device)]
        futures = [asyncio.get_running_loop().create_future() for _ in workers]
        for worker, future in zip(workers, futures, strict=True):
            self._releases[worker, request] = future
            worker.send(Release(request))
        try:
            returned = await asyncio.gather(*futures)
        finally:
            for worker in workers:
                self._releases.pop((worker, request), None)
        return {worker.id: each for worker, each in zip(workers, returned, strict=True)}

    def _released(self, worker: WorkerProcess, message: Released) -> None:
        self._device_metrics[worker.device].released(message)
        future = self._releases.get((worker, message.request))
        if future is not None and not future.done():
            future.set_result(dict(message.returned))

    def _dispatch(self) -> None:
        """Send what can be sent."""
        now_s = time.monotonic()
        batches, dropped = self.scheduler.dispatch(now_s)
        for item in dropped:
            self._too_late(item)
        for batch in batches:
            self._send(batch)
        if self._wake is not None:
            self._wake.cancel()
            self._wake = None
        wake_at = self.scheduler.wake_at()
        if wake_at is not None:
            self._wake = asyncio.get_running_loop().call_later(wake_at - now_s, self._dispatch)

    def _send(self, batch: Batch) -> None:
        waiting: list[_Waiting] = [item.payload for item in batch.items]
        worker = self._workers[batch.worker]
        served = self.models[batch.model]
        size, padding = served.metrics.batch(worker.device)
        size.observe(len(waiting))
        if batch.size > len(waiting):
            padding.inc(batch.size - len(waiting))
        run = Run(
            batch.id,
            served.index,
            tuple(each.slot for each in waiting),
            tuple(each.options for each in waiting),
            batch.size,
        )
        worker.send(run)

    def _expire(self, item: Item) -> None:
        """The deadline of an item has passed."""
        if self.scheduler.discard(item):
            self._too_late(item)
        elif not item.payload.future.done():
            # With a worker: the slot stays taken until the batch is done, the client need not wait for that.
            self.models[item.model].metrics.expired["infer"].inc()
            item.payload.future.set_exception(too_late())

    def _too_late(self, item: Item) -> None:
        """An item that will not be computed, already out of its queue."""
        self.models[item.model].metrics.expired["queue"].inc()
        self._fail(item, too_late())

    def _fail(self, item: Item, error: ServiceError) -> None:
        """An item out of its queue and with no worker ends."""
        self.models[item.model].slots.give(item.payload.slot)
        if not item.payload.future.done():
            item.payload.future.set_exception(error)

    def _again(self, items: Iterable[Item], reason: str, *, suspects: bool) -> None:
        """Items whose batch has failed: those that may be to blame run once more, each alone."""
        for item in items:
            if item.payload.future.done():  # The client left, or its deadline passed.
                self.models[item.model].slots.give(item.payload.slot)
            elif suspects and item.alone:
                log.error(
                    "an image for %s failed twice, the second time alone: %s", item.model, reason,
                    extra={"request_id": item.payload.request_id},
                )  # fmt: skip
                self._fail(item, ServiceError("INFERENCE_FAILED", "the model could not answer"))
            else:
                self.models[item.model].metrics.retried.inc()
                self.scheduler.requeue(item, alone=suspects or item.alone)

    def _worker_ready(self, worker: WorkerProcess) -> None:
        assert worker.ready is not None
        self._workers[worker.id] = worker
        loaded = zip(self.models, worker.ready.loaded, strict=True)
        self.scheduler.add_worker(worker.id, {name: each.latency_s for name, each in loaded if each})
        self._device_metrics[worker.device].ready()
        self._served_states.show(self._workers.values())
        log.info("%s is ready: %s", worker.id, worker.ready.device_name)
        self._dispatch()
        if worker.ready.staged:
            self._handovers.compile(worker)

    def _worker_message(self, worker: WorkerProcess, message: Any) -> None:
        now_s = time.monotonic()
        if isinstance(message, Done):
            batch = self.scheduler.finish(worker.id, message.batch_id, now_s, learn=not message.fitted)
            served = self.models[batch.model]
            served.statistics.batch(len(batch.items), message.infer_s)
            if message.fitted:
                self.scheduler.limit_batches(worker.id, batch.model, message.fitted, now_s)
                self._metrics.out_of_memory.labels(batch.model, worker.device).inc()
            span = self._traced(batch, worker, message, now_s)
            for item in batch.items:
                served.slots.give(item.payload.slot)
            self._finished(worker)  # The device first, then those who wait.
            for item, result in zip(batch.items, message.results, strict=True):
                if item.payload.future.done():
                    served.metrics.wasted.inc()
                else:
                    item.payload.future.set_result(Outcome(result, worker, message.infer_s, span))
        elif isinstance(message, Failed):
            batch = self.scheduler.finish(worker.id, message.batch_id, now_s, learn=False)
            about = {"request_id": ",".join(item.payload.request_id for item in batch.items), "worker": worker.id}
            log.error("a batch of %d for %s failed: %s", len(batch.items), batch.model, message.reason, extra=about)
            self._again(batch.items, message.reason, suspects=True)
            self._finished(worker)
        elif isinstance(message, Stats):
            self._device_metrics[worker.device].report(worker.id, message)
        elif isinstance(message, Released):
            self._released(worker, message)
        elif isinstance(message, HandOver):
            self._handovers.relieve(worker, message.trigger)

    def _traced(self, batch: Batch, worker: WorkerProcess, done: Done, now_s: float) -> SpanContext | None:
        """The span of a batch in which somebody's trace is recorded."""
        traces = [item.payload.trace for item in batch.items if item.payload.trace is not None]
        if self._tracing is None or not traces:
            return None
        assert worker.ready is not None
        loaded = worker.ready.loaded[self.models[batch.model].index]
        assert loaded is not None
        about = {
            "anychip.model": batch.model,
            "anychip.device": worker.device,
            "anychip.worker": worker.id,
            "anychip.engine": loaded.engine,
            "anychip.precision": loaded.precision,
            "anychip.images": len(batch.items),
            "anychip.padding": batch.size - len(batch.items),
            "anychip.infer_seconds": done.infer_s,
        }
        return self._tracing.batch(traces, batch.dispatched_s, now_s, about)

    def _finished(self, worker: WorkerProcess) -> None:
        if worker.retiring and self.scheduler.idle(worker.id):
            worker.drained.set()
        self._dispatch()

    def _worker_retiring(self, worker: WorkerProcess) -> None:
        self.scheduler.retire_worker(worker.id)
        if self.scheduler.idle(worker.id):
            worker.drained.set()

    def _worker_gone(self, worker: WorkerProcess, reason: str) -> None:
        self._workers.pop(worker.id, None)
        for (other, _), future in self._releases.items():
            if other is worker and not future.done():
                future.set_result({})
        last = not any(other.device == worker.device for other in self._workers.values())
        self._device_metrics[worker.device].gone(worker.id, last=last)
        self._served_states.show(self._workers.values())
        for number, batch in enumerate(self.scheduler.remove_worker(worker.id)):
            # Batches run in the order they were sent: the first may be to blame, the others had not begun.
            self._again(batch.items, reason, suspects=number == 0)
        self._dispatch()

    def _worker_died(self, replica: Replica, kind: str) -> None:
        self._metrics.worker_restarts.labels(replica.device, kind).inc()

    def _replica_broken(self, replica: Replica, reason: str) -> None:
        for name in self.models:
            if not self.expects(name):
                self._refuse_waiting(name, f"no worker is left for {name}")

    def _refuse_waiting(self, name: str, reason: str) -> None:
        for item in self.scheduler.discard_all(name):
            self._fail(item, ServiceError("NOT_READY", reason, retry_after_s=60))


def too_late() -> ServiceError:
    """The deadline of something that was accepted has passed."""
    return ServiceError("DEADLINE_EXCEEDED", "the deadline passed before the answer was there")
