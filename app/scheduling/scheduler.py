"""Scheduler: the next items to run, their worker, and their batch size.

Owns: the queues, the batches in flight, each worker's credits and the learned latencies. Pure logic: no torch, no
asyncio, no clock of its own (`now` is always a parameter, in seconds). Must not know what an item holds.

    reserve ─► (upload, decode) ─► enqueue ─► dispatch ─► Batch ─► finish
       └─ release ─┘                  │           └─ worker lost ─► requeue
                                      └─ discard: the client left, the deadline passed

Work-conserving: an idle worker gets what waits, at once. While it computes, one full batch may wait in front of it; a
partial batch keeps filling until the worker is free. While several clients ask, a full batch is dispatched late, so
that it can take images that come meanwhile (app.scheduling.workers). Models share a worker by device time, not by
requests: each has a virtual clock that advances by the seconds of its batches, and the model furthest behind goes first
(start-time fair queueing: Goyal, Vin, Cheng 1996). Admission refuses items that cannot be answered before their
deadline. Items that become hopeless later are dropped when a batch is formed, and never computed.

After a worker is lost, the items that may have been the reason run alone: nothing else is on their worker meanwhile, so
a second loss identifies the cause.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from itertools import count
from operator import itemgetter
from typing import Generic

from app.scheduling.queue import (
    AGAIN,
    ALONE,
    FIRST,
    QUEUED,
    Batch,
    DeadlineUnreachableError,
    LostBatches,
    Queue,
    Reservation,
    T,
    rank_s,
)
from app.scheduling.workers import (
    LEARNING_RATE,
    BatchLatencies,
    Serving,
    Sharing,
    WorkerState,
    age,
    expected_s,
    image_s,
    is_probe,
)

WAY_BACK = 0.04
"""Share of a request's time left for the answer's way to the client, which is not measured here."""

CHECK_STANDS_S = 0.001
"""Time for which an admission check stands: the body was there already."""

_CREDITS = 2  # One batch running, one in front of the worker.
_USUAL_RATE = 0.2
_STALL_S = 0.25


class Scheduler(Generic[T]):
    """Queues in front of workers. Not thread-safe: one thread (the event loop) calls it."""

    def __init__(self, queue_limits: Mapping[str, int], max_wait_s: float = 0.0) -> None:
        """Make a queue for each model; `queue_limits`: images each may have waiting, reservations included."""
        self.queues: Mapping[str, Queue[T]] = {model: Queue(limit) for model, limit in queue_limits.items()}
        self._workers: dict[str, WorkerState[T]] = {}
        # The workers that take new batches of a model. Replaced, never changed: a scrape reads it from its own thread.
        self.serving: Mapping[str, Serving[T]] = dict.fromkeys(queue_limits, ())
        self._free: dict[str, WorkerState[T]] = {}  # The workers that have a credit.
        self._max_wait_s = max_wait_s
        self._clients = Sharing()
        self._ids = count(1)
        self._order = count()

    def check(self, reservation: Reservation, now: float, ready_s: float | None = 0.0) -> float | None:
        """Check the admission of a request. `ready_s`: seconds until its last image can be enqueued; None while
        unknown.

        Returns the seconds until the last is expected to be answered, without lateness; None while the model has no
        worker, or `ready_s` is unknown. Raises NeverRoomError, QueueFullError, DeadlineUnreachableError.
        """
        model, images = reservation.model, reservation.images
        queue, serving = self.queues[model], self.serving[model]
        if images > queue.limit - queue.reserved - queue.depth:
            raise queue.full(model, images)
        within_s = (1 - WAY_BACK) * (reservation.deadline_s - now)
        last_s, least_s = expected_s(queue, serving, reservation, images, now=now, ready_s=ready_s or 0.0)
        if least_s > within_s and age(queue, serving, reservation, now):
            last_s, least_s = expected_s(queue, serving, reservation, images, now=now, ready_s=ready_s or 0.0)
        if least_s > within_s and not is_probe(queue, serving, reservation, within_s, now):
            raise DeadlineUnreachableError(least_s)
        return None if ready_s is None else last_s

    def reserve(
        self, reservation: Reservation, now: float, ready_s: Callable[[int], float | None] = lambda _: 0.0
    ) -> None:
        """Reserve room for the images of a request, all or none. The result of a `check` for one image stands for a
        moment. `ready_s`: returns the seconds until the last of so many images can be enqueued.

        Raises NeverRoomError, QueueFullError, DeadlineUnreachableError.
        """
        model, images = reservation.model, reservation.images
        queue, serving = self.queues[model], self.serving[model]
        if images == 1 and now < reservation.admitted_s + CHECK_STANDS_S:
            if images > queue.limit - queue.reserved - queue.depth:
                raise queue.full(model, images)
            first_s = reservation.expected_s
        else:
            first_s = self.check(reservation, now, ready_s(images))
        if images > 1:
            first_ready_s = ready_s(1)
            first_s, _ = expected_s(queue, serving, reservation, 1, now=now, ready_s=first_ready_s or 0.0)
            first_s = None if first_ready_s is None else first_s
        reservation.admitted_s, reservation.expected_s = now, first_s
        queue.begin(reservation)
        usual = round(queue.usual)
        reservation.batch_s = min([latencies.best_s(usual, now) for _, latencies in serving], default=0.0)
        self._clients.asked(reservation.client, now)

    def release(self, reservation: Reservation) -> None:
        """Give back the unused room of a request that has ended. Idempotent."""
        queue, left, client = self.queues[reservation.model], reservation.left, reservation.client
        if left:
            queue.reserved -= left
            queue.count(reservation.priority, -left)
        if client:
            queue.turns.end(client)
        reservation.left, reservation.client = 0, ""

    def enqueue(self, item: T, now: float) -> None:
        """Put an item of a reservation into the queue. Raises ValueError if the reservation has no place left.

        The queue is sorted by `rank_s`, the lowest first.
        """
        reservation, position = item.reservation, item.position
        model, priority = reservation.model, reservation.priority
        if not reservation.left:
            raise ValueError(f"nothing is left of this reservation for {model}")
        queue = self.queues[model]
        reservation.left -= 1
        queue.reserved -= 1
        item.queued_s = now
        each_s = image_s(self.serving[model], model) if position or reservation.behind else 0.0
        item.rank_s = rank_s(queue.turn_s(reservation, now, each_s), position, each_s, priority)
        queue.push(item, next(self._order))

    def requeue(self, item: T) -> None:
        """Put an item of a lost batch back at its old rank, even into a full queue: it was admitted."""
        if item.attempt is FIRST:
            item.attempt = AGAIN
        queue = self.queues[item.reservation.model]
        queue.count(item.reservation.priority, 1)
        queue.push(item, next(self._order))

    def discard(self, item: T) -> bool:
        """Take a waiting item out; return False if it no longer waits."""
        if item.status is not QUEUED:
            return False
        self.queues[item.reservation.model].take(item)
        return True

    def drain_time_s(self, model: str) -> float:
        """Return the seconds until what waits and runs now is done by the model's workers; infinite without one."""
        queue, each_s = self.queues[model], image_s(self.serving[model], model)
        return (queue.depth + queue.reserved + queue.in_flight) * each_s if each_s else math.inf

    def add_worker(
        self, name: str, latency_s: Mapping[str, Mapping[int, float]], depths: Mapping[str, int] | None = None
    ) -> None:
        """Add a worker that is ready. For each model, `latency_s`: seconds by batch size; `depths`: most batches that
        the device has begun at once (default 1).
        """
        if name in self._workers:
            raise ValueError(f"worker {name} is there already")
        latencies = {model: BatchLatencies(seconds) for model, seconds in latency_s.items()}
        self._workers[name] = self._free[name] = WorkerState(name, latencies, self.queues, depths or {})
        self._membership_changed()

    def serve_model(self, name: str, model: str, latency_s: Mapping[int, float] | None, depth: int = 1) -> None:
        """Let a worker serve one more model, or the same one anew; or no longer (None), once it has no batch of it."""
        worker = self._workers[name]
        if latency_s is None and any(batch.model == model for batch in worker.batches.values()):
            worker.leaving.add(model)
            self._membership_changed()
            return
        worker.leaving.discard(model)
        # Replaced, as the scrape of another thread may be reading them.
        others = {other: each for other, each in worker.latencies.items() if other != model}
        worker.latencies = others if latency_s is None else {**others, model: BatchLatencies(latency_s)}
        worker.depths = {**worker.depths, model: depth}
        worker.served_s[model] = worker.clock_s
        self._membership_changed()

    def retire_worker(self, name: str) -> None:
        """Dispatch nothing more to this worker; it may finish what is in flight. Unknown workers are ignored."""
        if name in self._workers:
            self._workers[name].retiring = True
            self._membership_changed()
            _note_credit(self._free, self._workers[name])

    def remove_worker(self, name: str) -> LostBatches[T]:
        """Remove a worker that is gone; return the batches it never finished. Unknown workers have none."""
        worker = self._workers.pop(name, None)
        if worker is None:
            return LostBatches((), ())
        self._membership_changed()
        self._free.pop(name, None)
        batches, begun = tuple(worker.batches.values()), worker.begun()
        for batch in batches:
            self.queues[batch.model].in_flight -= len(batch.items)
        if batches or not worker.retiring:
            worker.interrupted()
        return LostBatches(batches[:begun], batches[begun:])

    def limit_batches(self, name: str, model: str, size: int, now: float) -> None:
        """Limit the worker's batches of the model to `size` for a while: its memory held no more images."""
        self._workers[name].latencies[model].limit(size, now)

    def finish(self, name: str, batch_id: int, now: float, *, learn: bool = True, prepare_s: float = 0.0) -> Batch[T]:
        """Finish a batch; `learn`: its time is typical; `prepare_s`: as in the message Done. Raises KeyError."""
        worker = self._workers[name]
        batch = worker.batches.pop(batch_id)
        worker.alone = False
        _note_credit(self._free, worker)
        queue, latencies = self.queues[batch.model], worker.latencies[batch.model]
        queue.in_flight -= len(batch.items)
        taken_s = now - max(batch.dispatched_s, worker.finished_s)
        worker.finished_s = now
        # If something stood still, no model is charged for it, not even the model of this batch.
        credible_s = latencies.credible_s(batch.size, taken_s)
        worker.served_s[batch.model] += credible_s - latencies.seconds[batch.size]
        if taken_s > credible_s + _STALL_S:
            worker.interrupted()
        if learn:
            latencies.learn(batch.size, taken_s, now)
            worker.prepare_s += LEARNING_RATE * (prepare_s - worker.prepare_s)
            queue.late(batch.items, now)
        in_flight = worker.batches.values()
        worker.free_s = now + sum([worker.latencies[other.model].seconds[other.size] for other in in_flight])
        if batch.model in worker.leaving:
            self.serve_model(name, batch.model, None)
        return batch

    def dispatch(self, now: float) -> tuple[list[Batch[T]], list[T]]:
        """Return the batches to dispatch now, and the items dropped because no batch can answer them in time."""
        batches: list[Batch[T]] = []
        dropped: list[T] = []
        while self._free and any([queue.depth for queue in self.queues.values()]):  # noqa: C419 - faster
            at_once = now >= self._clients.until_s
            free = [
                worker
                for worker in self._free.values()
                if not worker.batches or (worker.is_full(now) and (at_once or now >= worker.next_at_s))
            ]
            if len(free) > 1:
                free.sort(key=lambda worker: worker.done_s(now))
            formed = next(filter(None, (self._form(worker, now, dropped) for worker in free)), None)
            if formed is None:
                break
            batches.append(formed)
        return batches, dropped

    def wake_at(self, now: float) -> float | None:
        """Return the time at which to call `dispatch` if nothing happens before; None if there is none.

        It is when an item has waited `max_wait_s` and a worker is idle, or, while several clients ask, when the next
        batch of a busy worker is due. Call this after `dispatch`: times that have passed do not count.
        """
        wake_s: list[float] = []
        if now < self._clients.until_s:
            busy = [worker for worker in self._free.values() if worker.batches]
            wake_s += [worker.next_at_s for worker in busy if worker.is_full(now)]
        if self._max_wait_s:
            wake_s += [
                queue.oldest_s() + self._max_wait_s
                for model, queue in self.queues.items()
                if queue.depth and not all(worker.batches for worker, _ in self.serving[model])
            ]
        return min((each for each in wake_s if each > now), default=None)

    def _membership_changed(self) -> None:
        active = [worker for worker in self._workers.values() if not worker.retiring]
        self.serving = {
            model: tuple(
                (worker, worker.latencies[model])
                for worker in active
                if model in worker.latencies.keys() - worker.leaving
            )
            for model in self.queues
        }

    def _form(self, worker: WorkerState[T], now: float, dropped: list[T]) -> Batch[T] | None:
        idle = not worker.batches
        waiting = [m for m in worker.latencies if self.queues[m].depth and m not in worker.leaving]
        for turn_s, model in sorted([(worker.turn_s(m), m) for m in waiting], key=itemgetter(0)):
            queue, latencies = self.queues[model], worker.latencies[model]
            if not idle and queue.line[0][2].attempt is ALONE:
                return None  # It waits until a worker has nothing else, and nothing may overtake it for ever.
            if queue.depth < latencies.ceiling(now):
                if not idle:
                    # The model whose turn it is keeps filling; another must not overtake it meanwhile.
                    return None
                if self._max_wait_s and now < queue.oldest_s() + self._max_wait_s:
                    continue
            most = latencies.short_size(now) if now < self._clients.until_s else queue.depth
            items, hopeless = _taken(queue, model, worker, self.serving[model], most=most, now=now)
            dropped += hopeless
            if not items:
                continue
            queue.usual += _USUAL_RATE * (len(items) - queue.usual)
            queue.in_flight += len(items)
            size = next(size for size in latencies.sizes if size >= len(items))
            worker.clock_s = turn_s
            worker.served_s[model] = turn_s + latencies.seconds[size]
            worker.free_s = max(now, worker.free_s) + latencies.seconds[size]
            worker.alone = items[0].attempt is ALONE
            batch = Batch(next(self._ids), worker.name, model, tuple(items), size, now)
            worker.batches[batch.id] = batch
            _note_credit(self._free, worker)
            return batch
        return None


def _note_credit(free: dict[str, WorkerState[T]], worker: WorkerState[T]) -> None:
    """Keep `worker` in `free` exactly while it has a credit."""
    if not worker.retiring and not worker.alone and len(worker.batches) < _CREDITS:
        free[worker.name] = worker
    else:
        free.pop(worker.name, None)


def _taken(
    queue: Queue[T], model: str, worker: WorkerState[T], serving: Serving[T], *, most: int, now: float
) -> tuple[list[T], list[T]]:
    """Take the items of a batch of at most `most` out of the queue; return them and the hopeless items."""
    latencies = worker.latencies[model]
    items: list[T] = []
    hopeless: list[T] = []
    wanted = latencies.best_size(min(queue.depth, most), now)
    best_s = here_s = now + worker.wait_s(now) + latencies.seconds[wanted]
    while queue.depth and len(items) < wanted:
        item = queue.line[0][2]
        alone, deadline_s = item.attempt is ALONE, item.reservation.deadline_s
        if alone and items:
            break
        if deadline_s < here_s:
            others = [(other, each) for other, each in serving if other is not worker]
            elsewhere_s = (now + other.wait_s(now) + each.seconds[each.sizes[0]] for other, each in others)
            best_s = min([here_s, *elsewhere_s])
            if best_s <= deadline_s < now + latencies.least_s:
                break  # This worker was never fast enough for it, another is: left to that one.
        queue.take(item)
        # One that is only expected to be late is dropped if others can use its place, and given a try if not.
        if deadline_s <= now or (deadline_s < best_s and queue.depth >= wanted - len(items)):
            hopeless.append(item)
            continue
        items.append(item)
        if alone:
            break
    if hopeless:
        queue.late(hopeless, max(now, best_s))
    return items, hopeless
