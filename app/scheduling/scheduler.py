"""Which items run next, where, and in batches of what size.

Owns: the queues, the batches in flight, each worker's credits and what was learned of latencies. Pure
logic: no torch, no asyncio, no clock of its own (`now` is always a parameter, in seconds). Must not know what an item
holds.

    reserve ─► (upload, decode) ─► enqueue ─► dispatch ─► Batch ─► finish
       └─ release ─┘                  │           └─ worker lost ─► requeue
                                      └─ discard: the client left, the deadline passed

Work-conserving: an idle worker gets whatever is there, at once. While it computes, one full batch may wait in front of
it; a partial batch keeps filling until the worker is free. Models share a worker by device time, not by requests: each
has a virtual clock that runs on by the seconds its batches take, and the model furthest behind goes first (start-time
fair queueing: Goyal, Vin, Cheng 1996). What cannot be answered before its deadline is refused at the door; what has
become hopeless meanwhile is dropped when a batch is formed, never computed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Generic

from app.scheduling.latency import Ladder, Lane, last_s
from app.scheduling.queue import Batch, DeadlineUnreachableError, Item, Queue, QueueFullError, Reservation, T

__all__ = [
    "PRIORITY_WORTH_S",
    "REQUEST_SHARE",
    "WAY_BACK",
    "Batch",
    "DeadlineUnreachableError",
    "Item",
    "QueueFullError",
    "Reservation",
    "Scheduler",
]

PRIORITY_WORTH_S = 1.0
"""Waiting time that one level of priority is worth: whoever waits long enough overtakes, so nobody starves."""

REQUEST_SHARE = 0.25
"""The images of one request queue as if they came one by one, at this share of what the workers can do: a request of
64 images leaves room for those that come after it, and on a device with nothing else to do it loses nothing."""

WAY_BACK = 0.04
"""Share of the time a request has that is left for its answer to reach the client: nobody here sees that part."""

_USUAL_RATE = 0.2
_CREDITS = 2  # One batch running, one in front of the worker.


@dataclass(slots=True)
class _Worker(Generic[T]):
    ladders: dict[str, Ladder]
    served_s: dict[str, float]
    clock_s: float = 0.0
    free_s: float = 0.0  # When all that is in flight is expected to be done.
    finished_s: float = 0.0
    retiring: bool = False
    batches: dict[int, Batch[T]] = field(default_factory=dict)

    def turn_s(self, model: str) -> float:
        """Where the model stands on the worker's clock. One that was idle stands at now: idleness earns no credit."""
        return max(self.clock_s, self.served_s[model])

    def wait_s(self, now: float) -> float:
        return max(0.0, self.free_s - now) if self.batches else 0.0


class Scheduler(Generic[T]):
    """Queues in front of workers. Not thread-safe: one thread (the event loop) calls it."""

    def __init__(self, queue_limits: Mapping[str, int], max_wait_s: float = 0.0) -> None:
        """`queue_limits`: images each model may have waiting, reservations included."""
        self._queues: dict[str, Queue[T]] = {model: Queue(limit) for model, limit in queue_limits.items()}
        self._workers: dict[str, _Worker[T]] = {}
        self._max_wait_s = max_wait_s
        self._ids = count(1)
        self._order = count()

    def check(self, model: str, images: int, deadline_s: float, priority: int, now: float) -> float:
        """Whether `images` more could be taken; returns the seconds until the last is expected to be answered.

        Raises QueueFullError, DeadlineUnreachableError.
        """
        queue = self._queues[model]
        if queue.reserved + queue.depth + images > queue.limit:
            raise QueueFullError(f"{model} has {queue.reserved + queue.depth} of {queue.limit} images waiting")
        ahead = queue.ahead_of(priority)
        expected_s, least_s = self._expected_s(model, ahead, images, now)
        if least_s > (1 - WAY_BACK) * (deadline_s - now):
            raise DeadlineUnreachableError(least_s)
        return expected_s

    def reserve(self, model: str, images: int, deadline_s: float, priority: int, now: float) -> Reservation:
        """Reserve room for `images`, all or none. Raises QueueFullError, DeadlineUnreachableError."""
        expected_s = self.check(model, images, deadline_s, priority, now)
        queue = self._queues[model]
        if images > 1:
            expected_s, _ = self._expected_s(model, queue.ahead_of(priority), 1, now)
        queue.reserved += images
        queue.count(priority, images)
        return Reservation(model, images, images, priority, deadline_s, now, expected_s)

    def release(self, reservation: Reservation) -> None:
        """Give back what was reserved and not filled. Idempotent."""
        if reservation.left:
            queue = self._queues[reservation.model]
            queue.reserved -= reservation.left
            queue.count(reservation.priority, -reservation.left)
            reservation.left = 0

    def enqueue(self, reservation: Reservation, payload: T, now: float, position: int = 0) -> Item[T]:
        """Turn one image of a reservation into a waiting item. Raises ValueError when nothing is left of it."""
        if not reservation.left:
            raise ValueError(f"nothing is left of this reservation for {reservation.model}")
        queue = self._queues[reservation.model]
        reservation.left -= 1
        queue.reserved -= 1
        queue.count(reservation.priority, -1)
        item = Item(
            reservation.model,
            payload,
            reservation.deadline_s,
            reservation.priority,
            position,
            reservation=reservation,
            enqueued_s=now,
        )
        rate = self._rate(reservation.model) if position else 0.0
        behind_s = position / (REQUEST_SHARE * rate) if rate else 0.0
        item.rank_s = now + behind_s - reservation.priority * PRIORITY_WORTH_S
        queue.push(item, next(self._order))
        return item

    def requeue(self, item: Item[T], *, alone: bool) -> None:
        """Put an item of a lost batch back where it was in the order, even into a full queue: it was accepted."""
        item.alone = alone
        self._queues[item.model].push(item, next(self._order))

    def discard(self, item: Item[T]) -> bool:
        """Take a waiting item out; False when it is no longer waiting."""
        if not item.queued:
            return False
        self._queues[item.model].discard(item)
        return True

    def discard_all(self, model: str) -> list[Item[T]]:
        """Take every waiting item of a model out."""
        queue = self._queues[model]
        items = [entry[2] for entry in sorted(queue.heap, key=lambda entry: entry[:2]) if entry[2].queued]
        for item in items:
            queue.discard(item)
        return items

    def waiting(self, model: str) -> int:
        """Items in the model's queue, reservations not included."""
        return self._queues[model].depth

    def reserved(self, model: str) -> int:
        """Images of the model for which room is reserved, and which are not in the queue yet."""
        return self._queues[model].reserved

    def in_flight(self, model: str) -> int:
        """Items with workers."""
        return sum(
            len(batch.items)
            for worker in self._workers.values()
            for batch in worker.batches.values()
            if batch.model == model
        )

    def drain_time_s(self, model: str) -> float:
        """Seconds until what waits and runs now is done, over all workers of the model; infinite without one."""
        rate = self._rate(model)
        queue = self._queues[model]
        return (queue.depth + queue.reserved + self.in_flight(model)) / rate if rate else float("inf")

    def add_worker(self, worker: str, latency_s: Mapping[str, Mapping[int, float]]) -> None:
        """A worker is ready; `latency_s`: for each model it serves, seconds by ladder size."""
        if worker in self._workers:
            raise ValueError(f"worker {worker} is there already")
        self._workers[worker] = _Worker(
            ladders={model: Ladder(seconds) for model, seconds in latency_s.items()},
            served_s=dict.fromkeys(latency_s, 0.0),
        )

    def retire_worker(self, worker: str) -> None:
        """Send this worker nothing more; what it has in flight it may finish. Unknown workers are none to retire."""
        if worker in self._workers:
            self._workers[worker].retiring = True

    def remove_worker(self, worker: str) -> tuple[Batch[T], ...]:
        """A worker is gone; returns the batches it never finished, in the order sent: only the first can have run."""
        gone = self._workers.pop(worker, None)
        return tuple(gone.batches.values()) if gone else ()

    def idle(self, worker: str) -> bool:
        """Whether nothing is in flight with this worker."""
        return worker not in self._workers or not self._workers[worker].batches

    def serves(self, model: str) -> bool:
        """Whether any worker serves the model."""
        return any(model in worker.ladders for worker in self._active())

    def limit_batches(self, worker: str, model: str, size: int, now: float) -> None:
        """The worker's memory held no more than `size` images of the model: no larger batches for a while."""
        self._workers[worker].ladders[model].limit(size, now)

    def finish(self, worker: str, batch_id: int, now: float, *, learn: bool = True) -> Batch[T]:
        """A batch is done; `learn`: whether the time it took says anything about the next. Raises KeyError."""
        state = self._workers[worker]
        batch = state.batches.pop(batch_id)
        taken_s = now - max(batch.dispatched_s, state.finished_s)
        state.finished_s = now
        ladder = state.ladders[batch.model]
        state.served_s[batch.model] += taken_s - ladder.of(batch.size)
        if learn:
            ladder.learn(batch.size, taken_s)
            self._queues[batch.model].late(batch.items, now)
        state.free_s = now + sum(state.ladders[other.model].of(other.size) for other in state.batches.values())
        return batch

    def dispatch(self, now: float) -> tuple[list[Batch[T]], list[Item[T]]]:
        """The batches to send now, and the items dropped because no batch can answer them in time any more."""
        batches: list[Batch[T]] = []
        dropped: list[Item[T]] = []
        formed = True
        while formed and any(queue.depth for queue in self._queues.values()):
            formed = False
            for name, worker in sorted(self._workers.items(), key=lambda entry: self._done_s(entry[1], now)):
                if worker.retiring or len(worker.batches) >= _CREDITS:
                    continue
                batch = self._form(name, worker, now, dropped)
                if batch is not None:
                    worker.batches[batch.id] = batch
                    worker.free_s = max(now, worker.free_s) + worker.ladders[batch.model].of(batch.size)
                    batches.append(batch)
                    formed = True
                    break
        return batches, dropped

    def wake_at(self) -> float | None:
        """When to dispatch again though nothing has happened: a batch has then waited `max_wait_s`."""
        if not self._max_wait_s or all(worker.batches for worker in self._active()):
            return None
        waiting = [queue.oldest_s() for queue in self._queues.values() if queue.depth]
        return min(waiting) + self._max_wait_s if waiting else None

    def _active(self) -> list[_Worker[T]]:
        # Of a copy: a scrape asks from a thread of its own whether a model is served.
        return [worker for worker in [*self._workers.values()] if not worker.retiring]

    def _done_s(self, worker: _Worker[T], now: float) -> float:
        """When the next batch of this worker would be done: the least of these gets the next items."""
        next_s = [
            ladder.of(ladder.best_size(self._queues[model].depth, now))
            for model, ladder in worker.ladders.items()
            if self._queues[model].depth
        ]
        return worker.wait_s(now) + min(next_s, default=0.0)

    def _rate(self, model: str) -> float:
        """Images a second that the model's workers can answer, less what other models with work take of them."""
        rate = 0.0
        for worker in self._active():
            if model in worker.ladders:
                rate += worker.ladders[model].rate / (1 + self._others(worker, model))
        return rate

    def _others(self, worker: _Worker[T], model: str) -> int:
        """Other models that have work for the worker."""
        return sum(other != model and bool(self._queues[other].ahead) for other in worker.ladders)

    def _expected_s(self, model: str, ahead: int, images: int, now: float) -> tuple[float, float]:
        """Seconds until the last of `images` behind `ahead` others is answered: by the queue alone, and with what
        answers were late of late, which is what an admission must reckon with.
        """
        workers = [worker for worker in self._active() if model in worker.ladders]
        if not workers:
            return 0.0, 0.0  # A worker is on its way and nothing is known of it: only the deadline itself can tell.
        queue = self._queues[model]
        if not ahead and any(not worker.batches for worker in workers):
            # With nothing in front of it an item is refused only if no batch was ever fast enough: an estimate that
            # has gone wrong could never get better if it kept away the work that would correct it.
            lanes = [Lane(worker.ladders[model], 0.0, 1, now) for worker in workers if not worker.batches]
            expected_s = last_s(lanes, images, images)
            own_s = min(lane.ladder.of(lane.ladder.best_size(images, now)) for lane in lanes)
            return expected_s, max(0.0, expected_s - own_s) + min(lane.ladder.least_s for lane in lanes)
        lanes = [
            Lane(worker.ladders[model], worker.wait_s(now), 1 + self._others(worker, model), now) for worker in workers
        ]
        expected_s = last_s(lanes, ahead + images, round(queue.usual))
        return expected_s, expected_s + queue.lateness.seconds

    def _form(self, name: str, worker: _Worker[T], now: float, dropped: list[Item[T]]) -> Batch[T] | None:
        idle = not worker.batches
        for model in sorted((m for m in worker.ladders if self._queues[m].depth), key=worker.turn_s):
            queue, ladder = self._queues[model], worker.ladders[model]
            if queue.depth < ladder.ceiling(now):
                if not idle:
                    # The model whose turn it is keeps filling; another must not overtake it meanwhile.
                    return None
                if self._max_wait_s and now < queue.oldest_s() + self._max_wait_s:
                    continue
            items = self._take(model, worker, now, dropped)
            if items:
                queue.usual += _USUAL_RATE * (len(items) - queue.usual)
                size = next(size for size in ladder.sizes if size >= len(items))
                worker.clock_s = worker.turn_s(model)
                worker.served_s[model] = worker.clock_s + ladder.of(size)
                return Batch(next(self._ids), name, model, tuple(items), size, now)
        return None

    def _take(self, model: str, worker: _Worker[T], now: float, dropped: list[Item[T]]) -> list[Item[T]]:
        queue, ladder = self._queues[model], worker.ladders[model]
        items: list[Item[T]] = []
        hopeless: list[Item[T]] = []
        wanted = ladder.best_size(queue.depth, now)
        here_s = now + worker.wait_s(now) + ladder.of(wanted)
        best_s = min(here_s, self._elsewhere_s(model, worker, now))
        while queue.depth and len(items) < wanted:
            item = queue.first()
            if item.alone and items:
                break
            if best_s <= item.deadline_s < now + ladder.least_s:
                break  # This worker was never fast enough for it, another is: left to that one.
            queue.discard(item)
            # One that is only expected to be late is dropped if others can use its place, and given a try if not.
            if item.deadline_s <= now or (item.deadline_s < best_s and queue.depth >= wanted - len(items)):
                hopeless.append(item)
                continue
            item.dispatched_s = now
            items.append(item)
            if item.alone:
                break
        queue.late(hopeless, max(now, best_s))
        dropped += hopeless
        return items

    def _elsewhere_s(self, model: str, worker: _Worker[T], now: float) -> float:
        """When the other workers could have answered the first that waits."""
        return min(
            (
                now + other.wait_s(now) + other.ladders[model].of(other.ladders[model].sizes[0])
                for other in self._active()
                if other is not worker and model in other.ladders
            ),
            default=float("inf"),
        )
