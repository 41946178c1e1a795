"""Dispatch of items to workers: batches are sent, and every item gets exactly one outcome.

    enqueue ─► dispatch ─► Run ─► worker ─► Done ─► Result
                  ▲                  ├─ Failed, or it is gone: its items again, one by one, once
                  └── every event ◄──┘

A failure to record a batch costs no answer. Everything here runs in the event loop's thread, so nothing needs a lock.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from app import clock
from app.errors import ServiceError
from app.fleet.process import WorkerProcess
from app.fleet.submission import ModelPool, Submission
from app.link import ComputedBy, Result, too_late
from app.observability.metrics import Metrics
from app.observability.tracing import Tracing
from app.processes.arena import Arena
from app.processes.place import ChildStatus
from app.scheduling.queue import ALONE, ENDED, FILLING, Batch
from app.scheduling.scheduler import Scheduler
from app.worker.messages import Done, Failed, Run
from app.worker.results import Arrays
from models import Options, TensorOptions

if TYPE_CHECKING:
    from opentelemetry.trace import SpanContext

REFUSED_IN_A_ROW = 64
"""Undecodable files of a model before the host decodes its files for a while: more than one request may have."""
PAUSE_S = 60.0

log = logging.getLogger("anychip.dispatcher")


class DeviceFiles:
    """Files of `models`, by name, for `workers`, by id, to decode. The owner of the mappings changes them.

    Files pass to a model's workers if all of them decode. They do not pass for a while after a row of files of which a
    device could decode none: each such file would cost a device call for every half of its batch, and its batch's time,
    before the host decodes it after all.
    """

    def __init__(self, models: Mapping[str, ModelPool], workers: Mapping[str, WorkerProcess]) -> None:
        self._models, self._workers = models, workers
        self._in_a_row: dict[ModelPool, int] = {}
        self._pauses: dict[ModelPool, asyncio.TimerHandle] = {}

    def workers_changed(self) -> None:
        """Decide for each model whether its files pass. A new worker may decode what the device could not before."""
        self.stop()
        self._in_a_row.clear()
        for pool in self._models.values():
            self._let_pass(pool)

    def stop(self) -> None:
        """End the pauses. Idempotent."""
        for pause in self._pauses.values():
            pause.cancel()
        self._pauses.clear()

    def refused(
        self, pool: ModelPool, batch: Batch[Submission], files: Sequence[int], done: Done, device: str
    ) -> frozenset[Submission]:
        """Return the items that are still wanted and whose files the device could not decode. Count both kinds.

        `files`: positions of the items that hold a file; others that the worker names are ignored.
        """
        undecoded = set(done.undecoded)
        refused = [batch.items[position] for position in files if position in undecoded]
        decoded = len(files) - len(refused)
        pool.metrics.device_decodes(device, decoded=decoded, refused=len(refused))
        self._in_a_row[pool] = 0 if decoded else self._in_a_row.get(pool, 0) + len(refused)
        if self._in_a_row[pool] >= REFUSED_IN_A_ROW and pool.passes_files:
            pool.passes_files = False
            self._pauses[pool] = asyncio.get_running_loop().call_later(PAUSE_S, self._end_pause, pool)
            message = "%s could decode none of the last %d files for %s: the host decodes them for %g s"
            log.warning(message, device, self._in_a_row[pool], pool.model.name, PAUSE_S)
        return frozenset([item for item in refused if item.status is not ENDED])

    def _end_pause(self, pool: ModelPool) -> None:
        del self._pauses[pool]
        self._in_a_row[pool] = 0
        self._let_pass(pool)

    def _let_pass(self, pool: ModelPool) -> None:
        loaded = [each.loaded[pool.index] for each in self._workers.values() if pool.index in each.loaded]
        pool.passes_files = bool(loaded) and all(each.decoding.by == "device" for each in loaded)


class Dispatcher:
    """Dispatch of batches of `models`, by name, to `workers`, by id; the fleet owns both."""

    def __init__(
        self,
        scheduler: Scheduler[Submission],
        models: Mapping[str, ModelPool],
        workers: Mapping[str, WorkerProcess],
        *,
        arena: Arena,
        metrics: Metrics,
        tracing: Tracing | None,
        refuse_unless_served: Callable[[str], None],
    ) -> None:
        """Make a dispatcher. `refuse_unless_served`: raises NOT_READY if requests for a model are refused."""
        self._scheduler, self._models, self._workers, self._arena = scheduler, models, workers, arena
        self._metrics, self._tracing, self._refuse_unless_served = metrics, tracing, refuse_unless_served
        self.files = DeviceFiles(models, workers)
        self._loop = asyncio.get_running_loop()
        self._dispatching = False  # True if `_dispatch` is due in this turn of the loop.
        self._wake: asyncio.TimerHandle | None = None

    def stop(self) -> None:
        """End the timers. Idempotent."""
        if self._wake is not None:
            self._wake.cancel()
        self.files.stop()

    def enqueue(self, item: Submission, now_s: float) -> None:
        """Queue an item whose slot is filled: for the first time, or at its former place.

        The item fails with NOT_READY if the model was unloaded or lost its last worker meanwhile.
        """
        if item.queued_s:
            self._scheduler.requeue(item)
        else:
            name = item.reservation.model
            if not self._scheduler.serving[name]:
                try:
                    self._refuse_unless_served(name)
                except ServiceError as error:
                    self._fail(item, error)
                    return
            self._scheduler.enqueue(item, now_s)
        self.dispatch_soon()

    def discard(self, item: Submission, error: ServiceError) -> None:
        """End an item that waits in its queue."""
        self._scheduler.discard(item)
        self._fail(item, error)

    def refuse_waiting(self, model: str, reason: str) -> None:
        """Fail every item that waits for a model: no worker will compute it."""
        for item in self._scheduler.queues[model].take_all():
            self._fail(item, ServiceError("NOT_READY", reason, retry_after_s=60))

    def dispatch_soon(self) -> None:
        """Dispatch once, after all events of this turn of the loop and before the tasks that they wake go on."""
        if not self._dispatching:
            self._dispatching = True
            self._loop.call_soon(self._dispatch)

    def _dispatch(self) -> None:
        self._dispatching = False
        now_s = clock.monotonic()
        batches, dropped = self._scheduler.dispatch(now_s)
        wake_s = self._scheduler.wake_at(now_s)
        for item in dropped:
            item.pool.metrics.expired["queue"].inc()
            self._fail(item, too_late())
        for batch in batches:
            self._send(batch)
        if self._wake is not None:
            self._wake.cancel()
            self._wake = None
        if wake_s is not None:
            # Timers have a resolution of a millisecond: a shorter one would be set again and again.
            self._wake = self._loop.call_later(max(wake_s - now_s, 1e-3), self._dispatch)

    def _send(self, batch: Batch[Submission]) -> None:
        """Send a batch to its worker; options that all items share are sent once."""
        worker, pool, items = self._workers[batch.worker], self._models[batch.model], batch.items
        asked = [item.options for item in items]
        if asked.count(asked[0]) == len(asked):
            asked = asked[:1]
        options = tuple([each for each in asked if isinstance(each, Options)])
        tensor_options = tuple([each for each in asked if isinstance(each, TensorOptions)])
        slots = tuple([item.slot for item in items])
        files = tuple([position for position, item in enumerate(items) if item.refill is not None])
        size, padding, _ = pool.metrics.batch(worker.device)
        size.observe(len(items))
        if batch.size > len(items):
            padding.inc(batch.size - len(items))
        worker.send(Run(batch.id, pool.index, slots, options, batch.size, files, tensor_options))

    def _fail(self, item: Submission, error: ServiceError) -> None:
        """End an item that is in no queue and with no worker."""
        item.end(error)
        item.give_slot()

    def _refill(self, item: Submission) -> None:
        """Have the host fill the slot with pixels: no device decoded the file, or the file may have ended a worker."""
        refill, item.refill = item.refill, None
        assert refill is not None
        item.status = FILLING
        refill(item)

    def _again(self, items: Iterable[Submission], reason: str, *, suspects: bool) -> None:
        """Retry the items of a failed batch. `suspects`: they may be to blame, and run once more, each alone."""
        for item in items:
            if item.status is ENDED:  # The client left, or its deadline passed.
                item.give_slot()
            elif suspects and item.attempt is ALONE and item.refill is None:
                about = {"request_id": item.request_id}
                name = item.reservation.model
                log.error("an image for %s failed twice, the second time alone: %s", name, reason, extra=about)
                self._fail(item, ServiceError("INFERENCE_FAILED", "the model could not answer"))
            else:
                item.pool.metrics.retried.inc()
                if suspects:
                    item.attempt = ALONE
                if suspects and item.refill is not None:  # Its file may be to blame: pixels do no harm.
                    self._refill(item)
                else:
                    self.enqueue(item, clock.monotonic())

    def computed(self, worker: WorkerProcess, done: Done, results: Sequence[Arrays]) -> None:
        """Handle a worker's answer: `results` has one entry for each item of the batch."""
        now_s = clock.monotonic()
        learn, prepare_s = not (done.fitted or done.undecoded), done.prepare_s
        batch = self._scheduler.finish(worker.name, done.batch_id, now_s, learn=learn, prepare_s=prepare_s)
        # From here on nothing may raise before the slots are given back: the batch is not recorded elsewhere.
        if len(results) != len(batch.items):
            self._lost(worker, batch, f"{len(results)} results came for {len(batch.items)} items")
            return
        pool = self._models[batch.model]
        if done.fitted:
            self._scheduler.limit_batches(worker.name, batch.model, done.fitted, now_s)
        span = self._recorded(batch, pool, worker, done)
        files = [position for position, item in enumerate(batch.items) if item.refill is not None]
        again = self.files.refused(pool, batch, files, done, worker.device) if files else ()
        for item in batch.items:
            if item not in again:
                pool.slots.give(item.slot)
        if any([queue.depth for queue in self._scheduler.queues.values()]):  # noqa: C419 - faster
            self.dispatch_soon()  # First the device, then the waiting clients.
        # By the worker's own model: after a hand-over the served one may differ.
        model, on = worker.model(pool.index), worker.loaded[pool.index]
        computed_by = ComputedBy(model.weights, worker.device, on.engine, on.precision)
        for item, arrays in zip(batch.items, results, strict=True):
            if item in again:
                self._refill(item)
            elif item.status is ENDED:
                pool.metrics.wasted.inc()
            else:
                placement, begun_s, queued_s = item.placement, item.begun_s, item.queued_s
                item.end(Result(arrays, model, computed_by, placement, begun_s, queued_s, done.infer_s, span))

    def _recorded(
        self, batch: Batch[Submission], pool: ModelPool, worker: WorkerProcess, done: Done
    ) -> SpanContext | None:
        try:
            pool.statistics.batch(len(batch.items), done.infer_s)
            pool.metrics.batch(worker.device)[2].observe(done.infer_s)
            if done.fitted:
                self._metrics.out_of_memory.labels(batch.model, worker.device).inc()
            traces = [trace for item in batch.items if (trace := item.terms.recorder.trace) is not None]
            if self._tracing is None or not traces:
                return None
            on = worker.loaded[pool.index]
            attributes = {
                "anychip.model": batch.model,
                "anychip.device": worker.device,
                "anychip.worker": worker.name,
                "anychip.engine": on.engine,
                "anychip.precision": on.precision,
                "anychip.images": len(batch.items),
                "anychip.padding": batch.size - len(batch.items),
                "anychip.infer_seconds": done.infer_s,
            }
            return self._tracing.batch(traces, batch.dispatched_s, clock.monotonic(), attributes)
        except Exception:
            log.exception("batch %d could not be recorded", batch.id)
            return None

    def failed(self, worker: WorkerProcess, failed: Failed) -> None:
        """Handle a worker's answer that a batch failed."""
        batch = self._scheduler.finish(worker.name, failed.batch_id, clock.monotonic(), learn=False)
        self._lost(worker, batch, failed.reason)

    def _lost(self, worker: WorkerProcess, batch: Batch[Submission], reason: str) -> None:
        about = {"request_id": ",".join(item.request_id for item in batch.items), "worker": worker.name}
        log.error("a batch of %d for %s failed: %s", len(batch.items), batch.model, reason, extra=about)
        self._again(batch.items, reason, suspects=True)
        self.dispatch_soon()

    def gone(self, worker: WorkerProcess, reason: str) -> None:
        """Retry all batches in flight on a worker that has ended."""
        lost = self._scheduler.remove_worker(worker.name)
        if worker.status is ChildStatus.QUARANTINED:
            for batch in (*lost.begun, *lost.waiting):
                self._move_out(worker, batch)
        for batch in lost.begun:
            self._again(batch.items, reason, suspects=True)
        for batch in lost.waiting:
            self._again(batch.items, reason, suspects=False)
        self.dispatch_soon()

    def _move_out(self, worker: WorkerProcess, batch: Batch[Submission]) -> None:
        """Move items to other slots: their worker's process cannot be killed and may still write to the old ones."""
        pool, process = self._models[batch.model], worker.process
        assert process is not None
        for item in batch.items:
            left, slot = item.slot, pool.slots.take()
            self._arena.slot(pool.index, slot)[:] = self._arena.slot(pool.index, left)
            item.slot = slot
            process.exited.add_done_callback(lambda _, left=left: pool.slots.give(left))  # type: ignore[misc]
        log.warning("%d slots of %s are in quarantine until %s is gone", len(batch.items), batch.model, worker.name)
