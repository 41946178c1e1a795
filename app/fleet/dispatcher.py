"""Sends batches to workers, and gives every item exactly one outcome.

    submit ─► enqueue ─► dispatch ─► Run ─► worker ─► Done ─► Outcome
                            ▲                  ├─ Failed, or it is gone: its items again, one by one, once
                            └── every event ◄──┘

Owns: the scheduler, the arena and its slots, the replicas, and every item until its outcome is known: no item is lost,
and none is answered twice. Must not know HTTP, encoded images or predictions. Everything here runs in the event loop's
thread, so nothing needs a lock.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Iterable, Mapping, Sequence

from app import logs
from app.config import Settings
from app.errors import ServiceError
from app.fleet.batch_records import BatchRecords
from app.fleet.device_files import DeviceFiles
from app.fleet.device_metrics import DeviceMetrics, ServedStates
from app.fleet.handover import Handovers
from app.fleet.outcome import Outcome, Pending, run_of, too_late
from app.fleet.plans import how_served, memories, worker_devices, worker_plans
from app.fleet.process import Computed, Message, WorkerProcess
from app.fleet.profiles import Profile, store_sizes
from app.fleet.quarantine import move_out
from app.fleet.readiness import Readiness
from app.fleet.refills import Refills
from app.fleet.releases import Releases
from app.fleet.replica import Events, Replica
from app.fleet.served_model import ModelPool
from app.link import ModelState
from app.observability.metrics import Metrics
from app.observability.tracing import RequestTrace, Tracing
from app.processes.arena import Arena
from app.scheduling.queue import Batch, Item, Reservation
from app.scheduling.scheduler import Scheduler
from app.worker.growth import LARGEST
from app.worker.messages import Failed, HandOver, Loaded, Released, Stats
from backends import Choice
from models import Model, NormalisedModel, Options, TensorOptions

log = logging.getLogger("anychip.dispatcher")


class Dispatcher:
    """Models on workers. Made, started and stopped inside one running event loop."""

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
        """`spare_slots`: beyond those of images that wait or are computed. `profiles`: of models, by name."""
        self._profiles = profiles or {}
        devices = worker_devices(settings, choice)
        # Two batches a worker, and twice as many workers while they hand over.
        served_with = [how_served(settings, self._profiles, model) for model in models]
        largest = max(LARGEST if how.grows else how.batch_sizes[-1] for how in served_with)
        slots = settings.queue_size + 2 * largest * 2 * len(devices) + spare_slots
        self.models = {model.name: ModelPool(index, model, slots, metrics) for index, model in enumerate(models)}
        for served in self.models.values():
            if isinstance(served.model, NormalisedModel):
                self.models[served.model.image_model.name].add_form(served)
        self.scheduler: Scheduler[Pending] = Scheduler(
            dict.fromkeys(self.models, settings.queue_size), settings.max_wait_ms / 1e3
        )
        self.arena = Arena([(math.prod(model.input_shape), slots) for model in models], memories(choice, models))
        self.replicas: list[Replica] = []
        self.readiness = Readiness(self.models, self.scheduler, self.replicas)
        self._loop = asyncio.get_running_loop()
        self._settings = settings
        self._choice = choice
        self._metrics = metrics
        self._records = BatchRecords(metrics, tracing)
        self._device_metrics = {device: DeviceMetrics(metrics, device, choice.vendor) for device in choice.devices}
        self._served_states = ServedStates(metrics)
        self._workers: dict[str, WorkerProcess] = {}
        self._dispatching = False  # It is about to, in this turn of the loop.
        self._wake: asyncio.TimerHandle | None = None
        self._handovers = Handovers(self.replicas, settings, metrics, self._keep_sizes)
        self._releases = Releases()
        self._refills = Refills(self._refilled)
        self._files = DeviceFiles(self.models, self._workers)
        for served in self.models.values():
            if not isinstance(served.model, NormalisedModel):
                self._watch(served)

    def _watch(self, served: ModelPool) -> None:
        queues = [self.scheduler.queues[name] for name in served.names]
        served.metrics.queue_depth.set_function(lambda: sum(queue.depth for queue in queues))
        served.metrics.queue_reserved.set_function(lambda: sum(queue.reserved for queue in queues))
        served.metrics.queue_limit.set(self._settings.queue_size * len(served.names))
        served.metrics.images_in_flight.set_function(lambda: served.images_under_way)
        served.metrics.slots_taken.set_function(lambda: served.slots_taken)

    async def start(self) -> None:
        """Start a worker for every replica; returns when all are ready. Raises WorkerStartError."""
        events = Events(
            ready=self._worker_ready,
            message=self._worker_message,
            retiring=self._worker_retiring,
            gone=self._worker_gone,
            died=self._worker_died,
            broken=self._replica_broken,
        )
        models = [served.model for served in self.models.values()]
        for device, plan in worker_plans(self._settings, self._choice, models, self._profiles):
            self.replicas.append(Replica(device, plan, self.arena, events))
        await asyncio.gather(*(replica.wait_ready() for replica in self.replicas))

    def _keep_sizes(self, device: str, sizes: Mapping[int, tuple[int, ...]]) -> None:
        """Batch sizes that a worker has found, by the number of the model, for the next start. Not for the loop."""
        if device != self._choice.device(self._choice.devices[0]).name:
            return  # Profiles are of the first device.
        for served in self.models.values():
            if served.index in sizes:
                try:
                    store_sizes(sizes[served.index], self._settings, self._choice, served.model)
                except OSError as error:
                    log.warning("the batch sizes found for %s cannot be kept: %s", served.model.name, error)

    async def stop(self) -> None:
        """Stop every worker; what is still under way has no outcome. Idempotent."""
        if self._wake is not None:
            self._wake.cancel()
        self._files.stop()
        await asyncio.gather(self._handovers.stop(), self._refills.stop())
        await asyncio.gather(*(replica.stop() for replica in self.replicas))
        self.arena.close()

    def refuse_unless_served(self, name: str) -> None:
        """Raises NOT_READY where no worker serves the model and none is being started for it."""
        state = self.readiness.state(name)
        if not state.accepts_requests:
            self.models[name].metrics.rejected["not_ready"].inc()
            retry_after_s = 60 if state is ModelState.UNLOADED else 1
            raise ServiceError("NOT_READY", self.readiness.reason(name), retry_after_s=retry_after_s)

    def workers(self) -> list[WorkerProcess]:
        """The workers that are ready."""
        return list(self._workers.values())

    def loaded(self, served: ModelPool) -> list[tuple[str, Loaded]]:
        """How each ready worker serves the model, with its device."""
        workers = [(worker.device, worker.ready) for worker in self._workers.values()]
        loaded = [(device, ready.loaded[served.index]) for device, ready in workers if ready]
        return [(device, each) for device, each in loaded if each]

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
    ) -> Item[Pending]:
        """Queue an item whose slot is filled. The caller must await `outcome`, which gives the slot back.

        Raises NOT_READY, the slot free again, where the model was unloaded or lost its last worker meanwhile.
        """
        name = reservation.model
        if not self.scheduler.serves(name) and not self.readiness.state(name).accepts_requests:
            self.models[name].slots.give(slot)
            self.refuse_unless_served(name)
        pending = Pending(slot, options, self._loop.create_future(), logs.request_id.get(), trace)
        item = self.scheduler.enqueue(reservation, pending, time.monotonic(), position)
        self._dispatch_soon()
        return item

    async def outcome(self, served: ModelPool, item: Item[Pending]) -> Outcome:
        """What became of an item; its slot is free afterwards, or as soon as no device looks at it any more.

        Raises ServiceError: DEADLINE_EXCEEDED, INFERENCE_FAILED, NOT_READY. Cancelled, it leaves the queue at once.
        """
        future = item.payload.future
        timer = self._loop.call_later(item.deadline_s - time.monotonic(), self._expire, item)
        try:
            return await future
        finally:
            timer.cancel()
            if self.scheduler.discard(item):
                served.slots.give(item.payload.slot)

    async def hand_over(self, models: Sequence[Model | None], reason: str) -> None:
        """Replace every worker by one that serves `models`, all at the same moment: in the same order, None for one
        that is to be unloaded. What still waits for such a one is refused. It goes on when the caller is cancelled.

        Raises WorkerStartError when a new worker cannot start: nothing has changed then.
        """
        await self._handovers.run(self._hand_over(tuple(models), reason))

    async def _hand_over(self, models: tuple[Model | None, ...], reason: str) -> None:
        await self._handovers.to(models, reason)
        for (name, served), model in zip(self.models.items(), models, strict=True):
            if model is not None:
                served.model = model
            else:
                self._refuse_waiting(name, f"{name} was unloaded")

    async def release(self, device: str | None = None) -> dict[str, dict[int, int]]:
        """Have every worker (of a device) release cached memory; returns bytes by worker and rung, once all have.

        A worker does it after the batches it has. One that ends meanwhile has returned nothing.
        """
        return await self._releases.release(
            [worker for worker in self._workers.values() if device in (None, worker.device)]
        )

    def _dispatch_soon(self) -> None:
        """Dispatch once, after all that this turn of the loop brings, and before those that it answers go on."""
        if not self._dispatching:
            self._dispatching = True
            self._loop.call_soon(self._dispatch)

    def _dispatch(self) -> None:
        """Send what can be sent."""
        self._dispatching = False
        now_s = time.monotonic()
        batches, dropped = self.scheduler.dispatch(now_s)
        for item in dropped:
            self._too_late(item)
        for batch in batches:
            self._send(batch)
        if self._wake is not None:
            self._wake.cancel()
            self._wake = None
        if (wake_at := self.scheduler.wake_at(now_s)) is not None:
            # Timers have a resolution of a millisecond: a shorter one would be asked for again and again.
            self._wake = self._loop.call_later(max(wake_at - now_s, 1e-3), self._dispatch)

    def _send(self, batch: Batch[Pending]) -> None:
        worker = self._workers[batch.worker]
        served = self.models[batch.model]
        self._records.sent(batch, served, worker.device)
        slots = tuple([item.payload.slot for item in batch.items])
        files = served.slots.files_among(slots)
        worker.send(run_of(batch, served.index, slots, files))

    def _expire(self, item: Item[Pending]) -> None:
        """The deadline of an item has passed."""
        if self.scheduler.discard(item):
            self._too_late(item)
        elif not item.payload.future.done():
            # With a worker: the slot stays taken until the batch is done, the client need not wait for that.
            self.models[item.model].metrics.expired["infer"].inc()
            item.payload.future.set_exception(too_late())

    def _too_late(self, item: Item[Pending]) -> None:
        """An item that will not be computed, already out of its queue."""
        self.models[item.model].metrics.expired["queue"].inc()
        self._fail(item, too_late())

    def _fail(self, item: Item[Pending], error: ServiceError) -> None:
        """An item out of its queue and with no worker ends."""
        self.models[item.model].slots.give(item.payload.slot)
        if not item.payload.future.done():
            item.payload.future.set_exception(error)

    def _again(self, items: Iterable[Item[Pending]], reason: str, *, suspects: bool) -> None:
        """Items whose batch has failed: those that may be to blame run once more, each alone."""
        for item in items:
            served, slot = self.models[item.model], item.payload.slot
            if item.payload.future.done():  # The client left, or its deadline passed.
                served.slots.give(slot)
            elif suspects and item.alone and slot not in served.slots.files:
                about = {"request_id": item.payload.request_id}
                log.error("an image for %s failed twice, the second time alone: %s", item.model, reason, extra=about)
                self._fail(item, ServiceError("INFERENCE_FAILED", "the model could not answer"))
            else:
                served.metrics.retried.inc()
                item.alone |= suspects
                refill = served.slots.files.pop(slot, None) if suspects else None
                if refill is None:
                    self.scheduler.requeue(item, alone=item.alone)
                else:  # It may be its file: pixels do no harm.
                    self._refills.begin(item, refill)

    def _worker_ready(self, worker: WorkerProcess) -> None:
        assert worker.ready is not None
        self._workers[worker.id] = worker
        loaded = {name: each for name, each in zip(self.models, worker.ready.loaded, strict=True) if each}
        self.scheduler.add_worker(
            worker.id,
            {name: each.latency_s for name, each in loaded.items()},
            {name: each.depth for name, each in loaded.items()},
        )
        self._device_metrics[worker.device].ready()
        self._served_states.show(self._workers.values())
        self._files.workers_changed()
        log.info("%s is ready: %s", worker.id, worker.ready.device_name)
        self._dispatch_soon()
        if worker.ready.staged:
            self._handovers.compile(worker)

    def _refilled(self, item: Item[Pending]) -> None:
        """An item's slot has pixels where a file was: it goes back to where it was in the queue."""
        if item.payload.future.done():
            self.models[item.model].slots.give(item.payload.slot)
        else:
            self.scheduler.requeue(item, alone=item.alone)
            self._dispatch_soon()

    def _worker_message(self, worker: WorkerProcess, message: Message) -> None:
        if isinstance(message, Computed):
            self._computed(worker, message)
        elif isinstance(message, Failed):
            self._failed(worker, message)
        elif isinstance(message, Stats):
            self._device_metrics[worker.device].report(worker.id, message)
        elif isinstance(message, Released):
            self._device_metrics[worker.device].released(message)
            self._releases.released(worker, message)
        elif isinstance(message, HandOver):
            self._handovers.relieve(worker, message.trigger)

    def _computed(self, worker: WorkerProcess, done: Computed) -> None:
        now_s = time.monotonic()
        learn, prepare_s = not (done.fitted or done.undecoded), done.prepare_s
        batch = self.scheduler.finish(worker.id, done.batch_id, now_s, learn=learn, prepare_s=prepare_s)
        # From here on nothing may raise before the slots are given back: the batch is nowhere else any more.
        if len(done.results) != len(batch.items):
            self._lost(worker, batch, f"{len(done.results)} results came for {len(batch.items)} items")
            return
        served = self.models[batch.model]
        if done.fitted:
            self.scheduler.limit_batches(worker.id, batch.model, done.fitted, now_s)
        span = self._records.done(batch, served, worker, done)
        again = self._files.freed(served, batch, done, worker.device)
        self._finished(worker)  # The device first, then those who wait.
        for item, result in zip(batch.items, done.results, strict=True):
            if item in again:
                self._refills.begin(item, again[item])
            elif item.payload.future.done():
                served.metrics.wasted.inc()
            else:
                item.payload.future.set_result(Outcome(result, worker, done.infer_s, span))

    def _failed(self, worker: WorkerProcess, failed: Failed) -> None:
        batch = self.scheduler.finish(worker.id, failed.batch_id, time.monotonic(), learn=False)
        self._lost(worker, batch, failed.reason)

    def _lost(self, worker: WorkerProcess, batch: Batch[Pending], reason: str) -> None:
        """A batch has failed, and the worker lives on."""
        about = {"request_id": ",".join(item.payload.request_id for item in batch.items), "worker": worker.id}
        log.error("a batch of %d for %s failed: %s", len(batch.items), batch.model, reason, extra=about)
        self._again(batch.items, reason, suspects=True)
        self._finished(worker)

    def _finished(self, worker: WorkerProcess) -> None:
        if worker.retiring and self.scheduler.idle(worker.id):
            worker.drained.set()
        self._dispatch_soon()

    def _worker_retiring(self, worker: WorkerProcess) -> None:
        self.scheduler.retire_worker(worker.id)
        if self.scheduler.idle(worker.id):
            worker.drained.set()

    def _worker_gone(self, worker: WorkerProcess, reason: str) -> None:
        self._workers.pop(worker.id, None)
        self._releases.worker_gone(worker)
        last = not any(other.device == worker.device for other in self._workers.values())
        self._device_metrics[worker.device].gone(worker.id, last=last)
        self._served_states.show(self._workers.values())
        self._files.workers_changed()
        lost = self.scheduler.remove_worker(worker.id)
        if worker.abandoned:
            for batch in (*lost.begun, *lost.waiting):
                move_out(self.arena, self.models[batch.model], worker, batch)
        for batch in lost.begun:
            self._again(batch.items, reason, suspects=True)
        for batch in lost.waiting:
            self._again(batch.items, reason, suspects=False)
        self._dispatch_soon()

    def _worker_died(self, replica: Replica, kind: str) -> None:
        self._metrics.worker_restarts.labels(replica.device, kind).inc()

    def _replica_broken(self, replica: Replica, reason: str) -> None:
        for name in self.models:
            if not self.readiness.state(name).accepts_requests:
                self._refuse_waiting(name, f"no worker is left for {name}")

    def _refuse_waiting(self, name: str, reason: str) -> None:
        for item in self.scheduler.queues[name].discard_all():
            self._fail(item, ServiceError("NOT_READY", reason, retry_after_s=60))
