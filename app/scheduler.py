"""Which items run next, where, and in batches of what size.

Owns: the queues and their bounds, the batches in flight, each worker's credits and what it has learned of latencies.
Pure logic: no torch, no asyncio, no clock of its own (`now` is always a parameter, in seconds). Must not know what an
item holds.

    reserve ─► (decode) ─► enqueue ─► dispatch ─► Batch ─► finish
       └─ release ─┘          └─ discard: the client left, the deadline passed

Work-conserving: an idle worker gets whatever is there, at once. While it computes, one full batch may wait in front of
it; a partial batch keeps filling until the worker is free. Models share a worker by device time, not by requests: each
has a virtual clock that runs on by the seconds its batches take, and the model furthest behind goes first (start-time
fair queueing: Goyal, Vin, Cheng 1996).
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any

PRIORITY_WORTH_S = 1.0
"""Waiting time that one level of priority is worth: whoever waits long enough overtakes, so nobody starves."""

_LEARNING_RATE = 0.2
_CREDITS = 2  # One batch running, one in front of the worker.


class QueueFullError(Exception):
    """The model has as many images waiting as it may have."""


@dataclass(eq=False, slots=True)
class Item:
    """One image that waits for its answer. `payload` is the caller's; deadlines and times are in seconds."""

    model: str
    payload: Any
    deadline_s: float
    priority: int = 0
    enqueued_s: float = 0.0
    dispatched_s: float = 0.0
    queued: bool = field(default=False, repr=False)


@dataclass(frozen=True, slots=True)
class Batch:
    """Items sent to a worker together, padded to `size`, one of the model's ladder."""

    id: int
    worker: str
    model: str
    items: tuple[Item, ...]
    size: int


class Latency:
    """Seconds a batch of each ladder size takes, learned from what was seen."""

    def __init__(self, seconds: Mapping[int, float]) -> None:
        """`seconds` by ladder size, as measured when the worker warmed up."""
        if not seconds or any(size < 1 or taken < 0 for size, taken in seconds.items()):
            raise ValueError("a ladder needs at least one positive size and no negative time")
        self._seconds = dict(sorted(seconds.items()))
        self.sizes = tuple(self._seconds)

    def learn(self, size: int, seconds: float) -> None:
        """Move the estimate for `size` towards what a batch just took."""
        self._seconds[size] += _LEARNING_RATE * (seconds - self._seconds[size])

    def of(self, size: int) -> float:
        """Seconds expected of a batch of ladder size `size`."""
        return self._seconds[size]

    def best_size(self, waiting: int) -> int:
        """The ladder size that answers most items a second when `waiting` are there; the larger one when equal.

        Where time grows with size (a CPU) that is the size below, without padding; where it hardly does (a GPU), the
        padded size above.
        """
        above = next((size for size in self.sizes if size >= waiting), self.sizes[-1])
        below = next((size for size in reversed(self.sizes) if size <= waiting), above)
        return max((above, below), key=lambda size: (min(size, waiting) / max(self._seconds[size], 1e-9), size))


@dataclass(slots=True)
class _Queue:
    limit: int
    reserved: int = 0
    depth: int = 0
    heap: list[tuple[float, int, Item]] = field(default_factory=list)

    def push(self, item: Item, order: int) -> None:
        heapq.heappush(self.heap, (item.enqueued_s - item.priority * PRIORITY_WORTH_S, order, item))
        item.queued = True
        self.depth += 1

    def pop(self) -> Item:
        while True:
            item = heapq.heappop(self.heap)[2]
            if item.queued:
                item.queued = False
                self.depth -= 1
                return item

    def discard(self, item: Item) -> None:
        item.queued = False
        self.depth -= 1
        # Discarded items stay in the heap until they surface; rebuilt when they are most of it, memory stays bounded.
        if len(self.heap) > 2 * self.depth + 16:
            self.heap = [entry for entry in self.heap if entry[2].queued]
            heapq.heapify(self.heap)

    def oldest_s(self) -> float:
        return min(entry[2].enqueued_s for entry in self.heap if entry[2].queued)


@dataclass(slots=True)
class _Worker:
    latency: dict[str, Latency]
    served_s: dict[str, float]
    clock_s: float = 0.0
    batches: dict[int, Batch] = field(default_factory=dict)

    def turn_s(self, model: str) -> float:
        """Where the model stands on the worker's clock. One that was idle stands at now: idleness earns no credit."""
        return max(self.clock_s, self.served_s[model])

    def backlog_s(self) -> float:
        return sum(self.latency[batch.model].of(batch.size) for batch in self.batches.values())


class Scheduler:
    """Queues in front of workers. Not thread-safe: one thread (the event loop) calls it."""

    def __init__(self, queue_limits: Mapping[str, int], max_wait_s: float = 0.0) -> None:
        """`queue_limits`: images each model may have waiting, reservations included."""
        self._queues = {model: _Queue(limit) for model, limit in queue_limits.items()}
        self._workers: dict[str, _Worker] = {}
        self._max_wait_s = max_wait_s
        self._ids = count(1)
        self._order = count()

    def reserve(self, model: str, images: int) -> None:
        """Take `images` places in the model's queue, all or none. Raises QueueFullError."""
        queue = self._queues[model]
        if queue.reserved + queue.depth + images > queue.limit:
            raise QueueFullError(f"{model} has {queue.reserved + queue.depth} of {queue.limit} images waiting")
        queue.reserved += images

    def release(self, model: str, images: int = 1) -> None:
        """Give reserved places back."""
        if self._queues[model].reserved < images:
            raise ValueError(f"{images} places of {model} were never reserved")
        self._queues[model].reserved -= images

    def enqueue(self, item: Item, now: float) -> None:
        """Turn a reserved place into a waiting item."""
        self.release(item.model)
        item.enqueued_s = now
        self._queues[item.model].push(item, next(self._order))

    def discard(self, item: Item) -> bool:
        """Take a waiting item out; False when it is no longer waiting."""
        if not item.queued:
            return False
        self._queues[item.model].discard(item)
        return True

    def waiting(self, model: str) -> int:
        """Items in the model's queue, reservations not included."""
        return self._queues[model].depth

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
        rate = sum(
            worker.latency[model].sizes[-1] / max(worker.latency[model].of(worker.latency[model].sizes[-1]), 1e-9)
            for worker in self._workers.values()
            if model in worker.latency
        )
        queue = self._queues[model]
        return (queue.depth + queue.reserved + self.in_flight(model)) / rate if rate else float("inf")

    def add_worker(self, worker: str, latency_s: Mapping[str, Mapping[int, float]]) -> None:
        """A worker is ready; `latency_s`: for each model it serves, seconds by ladder size."""
        if worker in self._workers:
            raise ValueError(f"worker {worker} is there already")
        self._workers[worker] = _Worker(
            latency={model: Latency(seconds) for model, seconds in latency_s.items()},
            served_s=dict.fromkeys(latency_s, 0.0),
        )

    def remove_worker(self, worker: str) -> tuple[Batch, ...]:
        """A worker is gone; returns the batches it never finished. Unknown workers have none."""
        gone = self._workers.pop(worker, None)
        return tuple(gone.batches.values()) if gone else ()

    def has_worker(self, worker: str) -> bool:
        """Whether this worker is there."""
        return worker in self._workers

    def serves(self, model: str) -> bool:
        """Whether any worker serves the model."""
        return any(model in worker.latency for worker in self._workers.values())

    def finish(self, worker: str, batch_id: int, seconds: float | None) -> Batch:
        """A batch is done; `seconds` it took on the device, None when that teaches nothing. Raises KeyError."""
        state = self._workers[worker]
        batch = state.batches.pop(batch_id)
        if seconds is not None:
            expected = state.latency[batch.model].of(batch.size)
            state.latency[batch.model].learn(batch.size, seconds)
            state.served_s[batch.model] += seconds - expected
        return batch

    def dispatch(self, now: float) -> tuple[list[Batch], list[Item]]:
        """The batches to send now, and the items dropped because their deadline has passed."""
        batches: list[Batch] = []
        expired: list[Item] = []
        # Idle workers first, then the least loaded: that is where an item is done soonest.
        for name, worker in sorted(self._workers.items(), key=lambda entry: entry[1].backlog_s()):
            while len(worker.batches) < _CREDITS:
                batch = self._form(name, worker, now, expired)
                if batch is None:
                    break
                worker.batches[batch.id] = batch
                batches.append(batch)
        return batches, expired

    def wake_at(self) -> float | None:
        """When to dispatch again though nothing has happened: a batch has then waited `max_wait_s`."""
        if not self._max_wait_s or all(worker.batches for worker in self._workers.values()):
            return None
        waiting = [queue.oldest_s() for queue in self._queues.values() if queue.depth]
        return min(waiting) + self._max_wait_s if waiting else None

    def _form(self, name: str, worker: _Worker, now: float, expired: list[Item]) -> Batch | None:
        idle = not worker.batches
        for model in sorted((m for m in worker.latency if self._queues[m].depth), key=worker.turn_s):
            queue, latency = self._queues[model], worker.latency[model]
            full = latency.sizes[-1]
            if queue.depth < full:
                if not idle:
                    # The model whose turn it is keeps filling; another must not overtake it meanwhile.
                    return None
                if self._max_wait_s and now < queue.oldest_s() + self._max_wait_s:
                    continue
            items = self._take(queue, latency, now, expired)
            if items:
                size = next(size for size in latency.sizes if size >= len(items))
                worker.clock_s = worker.turn_s(model)
                worker.served_s[model] = worker.clock_s + latency.of(size)
                return Batch(next(self._ids), name, model, tuple(items), size)
        return None

    @staticmethod
    def _take(queue: _Queue, latency: Latency, now: float, expired: list[Item]) -> list[Item]:
        items: list[Item] = []
        wanted = latency.best_size(queue.depth)
        while queue.depth and len(items) < wanted:
            item = queue.pop()
            if item.deadline_s <= now:
                expired.append(item)
            else:
                item.dispatched_s = now
                items.append(item)
        return items
