"""Which items run next, where, and in batches of what size.

Owns: the queues, the batches in flight, each worker's credits and what was learned of latencies. Pure logic: no torch,
no asyncio, no clock of its own (`now` is always a parameter, in seconds). Must not know what an item holds.

    reserve ─► (upload, decode) ─► enqueue ─► dispatch ─► Batch ─► finish
       └─ release ─┘                  │           └─ worker lost ─► requeue
                                      └─ discard: the client left, the deadline passed

Work-conserving: an idle worker gets whatever is there, at once. While it computes, one full batch may wait in front of
it; a partial batch keeps filling until the worker is free, and while several clients ask a full one is sent late, so
that whoever comes meanwhile has a place in it (app.scheduling.contention). Only where it may cost images a second, one
stands still a moment for a client that asks again as soon as it is answered (app.scheduling.returning). Models share a
worker by device time, not by requests: each has a virtual clock that runs on by the seconds its batches take, and the
model furthest behind goes first (start-time fair queueing: Goyal, Vin, Cheng 1996). What cannot be answered before its
deadline is refused at the door; what has become hopeless meanwhile is dropped when a batch is formed, never computed.

After a worker is lost, the items that may have been the reason run alone: nothing else is on their worker meanwhile, so
that a second loss shows which one it was.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from itertools import count
from typing import Generic

from app.scheduling.batching import Ladder
from app.scheduling.contention import RATE_KEPT, Sharing
from app.scheduling.expectation import expected_s
from app.scheduling.probes import is_due
from app.scheduling.queue import Batch, Checked, DeadlineUnreachableError, Item, LostBatches, Queue, Reservation, T
from app.scheduling.returning import LEAST_PAUSE_S, Returning
from app.scheduling.worker_state import WorkerState

PRIORITY_WORTH_S = 1.0
"""Waiting time that one level of priority is worth: whoever waits long enough overtakes, so nobody starves."""

REQUEST_SHARE = 0.25
"""The images of one request queue as if they came one by one, at this share of what the workers can do: a request of
64 images leaves room for those that come after it, and on a device with nothing else to do it loses nothing. So do
the requests of one client, for those of others."""

WAY_BACK = 0.04
"""Share of the time a request has that is left for its answer to reach the client: nobody here sees that part."""

_USUAL_RATE = 0.2
_STALL_S = 0.25


class Scheduler(Generic[T]):
    """Queues in front of workers. Not thread-safe: one thread (the event loop) calls it."""

    def __init__(self, queue_limits: Mapping[str, int], max_wait_s: float = 0.0, rate_kept: float = RATE_KEPT) -> None:
        """`queue_limits`: images each model may have waiting, reservations included. `rate_kept`: as of Sharing."""
        aged = max_wait_s > 0
        self._queues: dict[str, Queue[T]] = {model: Queue(limit, aged=aged) for model, limit in queue_limits.items()}
        self._workers: dict[str, WorkerState[T]] = {}
        # The workers that take new batches of a model. Replaced, never changed: a scrape reads it from its own thread.
        self._serving: dict[str, tuple[tuple[WorkerState[T], Ladder], ...]] = dict.fromkeys(queue_limits, ())
        self._free: dict[str, WorkerState[T]] = {}  # The workers that have a credit.
        self._max_wait_s = max_wait_s
        self._clients = Sharing(rate_kept)
        self._returning = Returning()
        self._ids = count(1)
        self._order = count()

    def check(self, model: str, images: int, deadline_s: float, priority: int, now: float) -> float | None:
        """Whether `images` more could be taken.

        Returns the seconds until the last is expected to be answered, lateness not included; None while the model has
        no worker. Raises NeverRoomError, QueueFullError, DeadlineUnreachableError.
        """
        queue = self._queues[model]
        queue.check_room(model, images)
        expected_s, least_s = self._expected_s(model, priority, images, now)
        within_s = (1 - WAY_BACK) * (deadline_s - now)
        if least_s > within_s and not is_due(queue, self._serving[model], images, within_s, now, priority=priority):
            raise DeadlineUnreachableError(least_s)
        return expected_s

    def reserve(
        self,
        model: str,
        images: int,
        deadline_s: float,
        priority: int,
        now: float,
        *,
        client: str = "",
        checked: Checked | None = None,
    ) -> Reservation:
        """Reserve room for `images` of a client, all or none. `checked`: what `check` has found for one of them.

        Raises NeverRoomError, QueueFullError, DeadlineUnreachableError.
        """
        queue = self._queues[model]
        if checked is not None and images == 1 and checked.stands(model, deadline_s, priority, now):
            queue.check_room(model, images)
            expected_s = checked.expected_s
        else:
            expected_s = self.check(model, images, deadline_s, priority, now)
        self._clients.asked(client, now)
        if images > 1:
            expected_s, _ = self._expected_s(model, priority, 1, now)
        return queue.begin(Reservation(model, images, images, priority, deadline_s, now, expected_s, client=client))

    def release(self, reservation: Reservation) -> None:
        """The request has ended: give back what was reserved and not filled. Idempotent."""
        self._queues[reservation.model].end(reservation)

    def enqueue(self, reservation: Reservation, payload: T, now: float, position: int = 0) -> Item[T]:
        """Turn one image of a reservation into a waiting item. Raises ValueError when nothing is left of it."""
        model, priority = reservation.model, reservation.priority
        if not reservation.left:
            raise ValueError(f"nothing is left of this reservation for {model}")
        queue = self._queues[model]
        reservation.left -= 1
        queue.reserved -= 1
        queue.count(priority, -1)
        item = Item(model, payload, reservation.deadline_s, priority, position, reservation=reservation, enqueued_s=now)
        rate = self._rate(model) if position or reservation.behind else 0.0
        rank_s = queue.rank_s(reservation, now, position, 1 / (REQUEST_SHARE * rate) if rate else 0.0)
        item.rank_s = rank_s - priority * PRIORITY_WORTH_S
        queue.push(item, next(self._order))
        if reservation.client and not position:
            self._returning.came(reservation.client, now)
        return item

    def requeue(self, item: Item[T], *, alone: bool) -> None:
        """Put an item of a lost batch back where it was in the order, even into a full queue: it was accepted."""
        item.alone = alone
        item.requeued = True
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
        return self._queues[model].in_flight

    def drain_time_s(self, model: str) -> float:
        """Seconds until what waits and runs now is done, over all workers of the model; infinite without one."""
        rate = self._rate(model)
        queue = self._queues[model]
        return (queue.depth + queue.reserved + queue.in_flight) / rate if rate else math.inf

    def add_worker(
        self, name: str, latency_s: Mapping[str, Mapping[int, float]], depths: Mapping[str, int] | None = None
    ) -> None:
        """A worker is ready. For each model it serves, `latency_s`: seconds by ladder size; `depths`: how many batches
        it has begun at most at once (default 1).
        """
        if name in self._workers:
            raise ValueError(f"worker {name} is there already")
        ladders = {model: Ladder(seconds) for model, seconds in latency_s.items()}
        worker: WorkerState[T] = WorkerState(name, ladders, depths or {}, dict.fromkeys(latency_s, 0.0))
        self._workers[name] = worker
        self._membership_changed()
        self._credits_changed(worker)

    def retire_worker(self, name: str) -> None:
        """Send this worker nothing more; what it has in flight it may finish. Unknown workers are none to retire."""
        if name in self._workers:
            self._workers[name].retiring = True
            self._membership_changed()
            self._credits_changed(self._workers[name])

    def remove_worker(self, name: str) -> LostBatches[T]:
        """A worker is gone; returns the batches it never finished. Unknown workers have none."""
        worker = self._workers.pop(name, None)
        if worker is None:
            return LostBatches((), ())
        self._membership_changed()
        self._free.pop(name, None)
        self._returning.begun(name)
        batches, begun = tuple(worker.batches.values()), worker.begun()
        for batch in batches:
            self._queues[batch.model].in_flight -= len(batch.items)
        if batches or not worker.retiring:
            self._interrupted(worker)
        return LostBatches(batches[:begun], batches[begun:])

    def idle(self, name: str) -> bool:
        """Whether nothing is in flight with this worker."""
        return name not in self._workers or not self._workers[name].batches

    def serves(self, model: str) -> bool:
        """Whether any worker takes new batches of the model."""
        return bool(self._serving[model])

    def limit_batches(self, name: str, model: str, size: int, now: float) -> None:
        """The worker's memory held no more than `size` images of the model: no larger batches for a while."""
        self._workers[name].ladders[model].limit(size, now)

    def finish(self, name: str, batch_id: int, now: float, *, learn: bool = True, prepare_s: float = 0.0) -> Batch[T]:
        """A batch is done; `learn`: whether its time says anything of others; `prepare_s`: Done's. Raises KeyError."""
        worker = self._workers[name]
        batch = worker.batches.pop(batch_id)
        worker.alone = False
        self._credits_changed(worker)
        queue, ladder = self._queues[batch.model], worker.ladders[batch.model]
        queue.in_flight -= len(batch.items)
        taken_s = now - max(batch.dispatched_s, worker.finished_s)
        worker.finished_s = now
        # Where something stood still, that is nobody's: not the time of the model whose batch it happened to.
        worker.served_s[batch.model] += (credible_s := ladder.credible_s(batch.size, taken_s)) - ladder.of(batch.size)
        if taken_s > credible_s + _STALL_S:
            self._interrupted(worker)
        if learn:
            ladder.learn(batch.size, taken_s)
            worker.learn_preparation(prepare_s)
            queue.late(batch.items, now)
        if self._clients.at(now):
            kept = self._clients.rate_kept
            size = ladder.short_size(kept, now)
            spare_s = ladder.spare_s(size, kept)
            if spare_s >= LEAST_PAUSE_S:  # Else nothing of this is wanted, and it takes its time in a long queue.
                places = size - queue.before(now)
                self._returning.answered(name, queue.answered(batch.items), spare_s, places, now)
        worker.free_s = now + sum([worker.ladders[other.model].of(other.size) for other in worker.batches.values()])
        return batch

    def dispatch(self, now: float) -> tuple[list[Batch[T]], list[Item[T]]]:
        """The batches to send now, and the items dropped because no batch can answer them in time any more."""
        batches: list[Batch[T]] = []
        dropped: list[Item[T]] = []
        formed = True
        while formed and self._free and any(queue.depth for queue in self._queues.values()):
            formed = False
            free = [worker for worker in self._free.values() if self._takes_more(worker, now)]
            if len(free) > 1:
                free.sort(key=lambda worker: self._done_s(worker, now))
            for worker in free:
                batch = self._form(worker, now, dropped)
                if batch is not None:
                    batches.append(batch)
                    formed = True
                    break
        return batches, dropped

    def wake_at(self, now: float) -> float | None:
        """When to dispatch again though nothing has happened: a batch for an idle worker has waited `max_wait_s`, the
        next of a busy one is due, or a worker has waited long enough for a client.

        To be asked after `dispatch`: what an idle worker did not take then waits for another worker, not for a moment.
        """
        wake_s = self._returning.ends_s()  # Also once nobody else asks any more.
        if self._clients.at(now):
            busy = [worker for worker in self._free.values() if worker.batches]
            wake_s += [worker.next_at_s for worker in busy if self._fills(worker, now) and not worker.returning]
        if self._max_wait_s:
            wake_s += [
                queue.oldest_s() + self._max_wait_s
                for model, queue in self._queues.items()
                if queue.depth and not all(worker.batches for worker, _ in self._serving[model])
            ]
        return min((each for each in wake_s if each > now), default=None)

    def _interrupted(self, worker: WorkerState[T]) -> None:
        """The worker is gone, or has stood still: how late what was admitted until now is says nothing of the rest."""
        for model in worker.ladders:
            self._queues[model].interruptions += 1

    def _membership_changed(self) -> None:
        active = [worker for worker in self._workers.values() if not worker.retiring]
        self._serving = {
            model: tuple((worker, worker.ladders[model]) for worker in active if model in worker.ladders)
            for model in self._queues
        }

    def _credits_changed(self, worker: WorkerState[T]) -> None:
        if worker.has_credit:
            self._free[worker.name] = worker
        else:
            self._free.pop(worker.name, None)

    def _fills(self, worker: WorkerState[T], now: float) -> bool:
        """Whether a full batch waits for the worker: nothing less goes behind another batch."""
        return any([self._queues[model].depth >= ladder.ceiling(now) for model, ladder in worker.ladders.items()])  # noqa: C419 - faster

    def _takes_more(self, worker: WorkerState[T], now: float) -> bool:
        """Whether a batch is sent to a worker that has a credit."""
        if not worker.batches:
            return not self._returning.waits(worker.name, now)
        at_once = not self._clients.at(now)
        return self._fills(worker, now) and (at_once or (now >= worker.next_at_s and not worker.returning))

    def _done_s(self, worker: WorkerState[T], now: float) -> float:
        """When the next batch of this worker would be done: the least of these gets the next items."""
        depths = [(self._queues[model].depth, ladder) for model, ladder in worker.ladders.items()]
        return worker.wait_s(now) + min([ladder.best_s(depth, now) for depth, ladder in depths if depth], default=0.0)

    def _rate(self, model: str) -> float:
        """Images a second that the model's workers can answer, less what other models with work take of them."""
        return sum([ladder.rate / self._sharing(model, worker) for worker, ladder in self._serving[model]])

    def _sharing(self, model: str, worker: WorkerState[T]) -> int:
        """How many models have work for the worker, this one included."""
        if len(worker.ladders) == 1:
            return 1
        return 1 + sum([other != model and bool(self._queues[other].ahead) for other in worker.ladders])

    def _expected_s(self, model: str, priority: int, images: int, now: float) -> tuple[float | None, float]:
        sharing = partial(self._sharing, model)
        return expected_s(self._queues[model], self._serving[model], sharing, priority=priority, images=images, now=now)

    def _form(self, worker: WorkerState[T], now: float, dropped: list[Item[T]]) -> Batch[T] | None:
        """Form the worker's next batch and count it as in flight; None where there is none for it now."""
        idle = not worker.batches
        for model in sorted((m for m in worker.ladders if self._queues[m].depth), key=worker.turn_s):
            queue, ladder = self._queues[model], worker.ladders[model]
            if not idle and queue.first().alone:
                return None  # It waits until a worker has nothing else, and nothing may overtake it for ever.
            if queue.depth < ladder.ceiling(now):
                if not idle:
                    # The model whose turn it is keeps filling; another must not overtake it meanwhile.
                    return None
                if self._max_wait_s and now < queue.oldest_s() + self._max_wait_s:
                    continue
            items = self._take(model, worker, now, dropped)
            if items:
                return self._send(model, worker, tuple(items), now)
        return None

    def _send(self, model: str, worker: WorkerState[T], items: tuple[Item[T], ...], now: float) -> Batch[T]:
        queue, ladder = self._queues[model], worker.ladders[model]
        queue.usual += _USUAL_RATE * (len(items) - queue.usual)
        queue.in_flight += len(items)
        size = next(size for size in ladder.sizes if size >= len(items))
        worker.clock_s = worker.turn_s(model)
        worker.served_s[model] = worker.clock_s + ladder.of(size)
        worker.free_s = max(now, worker.free_s) + ladder.of(size)
        worker.alone = items[0].alone
        self._returning.begun(worker.name)
        worker.returning = self._clients.at(now) and self._returning.likely(
            {item.reservation.client for item in items if item.reservation is not None}
        )
        batch = Batch(next(self._ids), worker.name, model, items, size, now)
        worker.batches[batch.id] = batch
        self._credits_changed(worker)
        return batch

    def _take(self, model: str, worker: WorkerState[T], now: float, dropped: list[Item[T]]) -> list[Item[T]]:
        """Take the items of a batch out of the queue; those that are hopeless go to `dropped`."""
        queue, ladder = self._queues[model], worker.ladders[model]
        most = ladder.short_size(self._clients.rate_kept, now) if self._clients.at(now) else queue.depth
        items: list[Item[T]] = []
        hopeless: list[Item[T]] = []
        wanted = ladder.best_size(min(queue.depth, most), now)
        best_s = here_s = now + worker.wait_s(now) + ladder.of(wanted)
        while queue.depth and len(items) < wanted:
            item = queue.first()
            if item.alone and items:
                break
            if item.deadline_s < here_s:
                best_s = min(here_s, self._elsewhere_s(model, worker, now))
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
        if hopeless:
            queue.late(hopeless, max(now, best_s))
            dropped += hopeless
        return items

    def _elsewhere_s(self, model: str, worker: WorkerState[T], now: float) -> float:
        """When the other workers could have answered the first that waits."""
        others = [(other, ladder) for other, ladder in self._serving[model] if other is not worker]
        return min((now + other.wait_s(now) + ladder.of(ladder.sizes[0]) for other, ladder in others), default=math.inf)
