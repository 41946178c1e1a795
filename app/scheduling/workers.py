"""What the scheduler knows of workers, and what follows from that: when an image that comes now would be answered.

Owns: a worker's batches and clocks; whether several clients ask at present, and how early the next batch then goes to a
worker that computes one; these estimates, and which image is let in although they are too late. Pure logic; times are
in seconds, the clock is a parameter.

While several clients ask, the next image of each shall wait behind as few batches as it can. An image that comes while
a worker computes waits for the rest of that batch, for the one in front of the worker, where it was sent already, and
for its own. Only the second of these can be spared: what has begun cannot be stopped. So the next batch is sent late,
with what has come until then, and yet so early that the worker never waits for it.

Admission refuses by what it has learned, and what it refuses teaches nothing: a model of which everything is refused
would keep its estimates, and be refused, for as long as another one keeps the worker busy. So a request is let in now
and then although the estimates say no.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic

from app.scheduling.batching import BatchLatencies, WorkerTimeline, last_s
from app.scheduling.queue import Batch, Queue, T

_REMEMBERED_S = 1.0
"""Clients share for so long after two of them have asked within such a time."""
_EARLY_S = 0.004
"""What the event loop and the socket may take, and an estimate of a batch may be wrong by."""
_EARLY_SHARE = 0.15
"""And of a batch's time: a worker that begins a batch before the one before is done looks for it that early."""
_PREPARATIONS = 2.0
_LEARNING_RATE = 0.2
_CREDITS = 2  # One batch running, one in front of the worker.
RATE_KEPT = 0.97
"""Share of the most images a second that a worker still answers with the shorter batches of this time."""


class Sharing:
    """Whether several clients have asked of late."""

    __slots__ = ("_client", "_seen_s", "_until_s")

    def __init__(self) -> None:
        self._client, self._seen_s = "", -math.inf
        self._until_s = -math.inf

    def asked(self, client: str, now: float) -> None:
        """A client asks; "" where it is not known which."""
        if client != self._client:
            if now < self._seen_s + _REMEMBERED_S:
                self._until_s = now + _REMEMBERED_S
            self._client = client
        self._seen_s = now

    def at(self, now: float) -> bool:
        """Whether they do now."""
        return now < self._until_s


def early_s(batch_s: float, prepare_s: float) -> float:
    """How long before a batch of `batch_s` is done the next one is sent; `prepare_s`: what that takes beside it."""
    return _EARLY_S + _EARLY_SHARE * batch_s + _PREPARATIONS * prepare_s


@dataclass(slots=True)
class WorkerState(Generic[T]):
    """A worker's batches and clocks, what is known of its speed, and the queues of its models.

    `depths`: for each model, how many batches of it the device has begun at most at once; `leaving`: it gets no more of
    these, and is to finish what it has.
    """

    name: str
    latencies: Mapping[str, BatchLatencies]
    queues: Mapping[str, Queue[T]]
    depths: Mapping[str, int]
    served_s: dict[str, float]
    clock_s: float = 0.0
    free_s: float = 0.0  # When all that is in flight is expected to be done.
    finished_s: float = 0.0
    prepare_s: float = 0.0  # What it does for a batch while it computes the one before.
    retiring: bool = False
    leaving: set[str] = field(default_factory=set)
    alone: bool = False  # It has an item that must be its only one.
    batches: dict[int, Batch[T]] = field(default_factory=dict)

    def turn_s(self, model: str) -> float:
        """Where the model stands on the worker's clock. One that was idle stands at now: idleness earns no credit."""
        return max(self.clock_s, self.served_s[model])

    def wait_s(self, now: float) -> float:
        """Seconds until all that is in flight is expected to be done."""
        return self.free_s - now if self.batches and self.free_s > now else 0.0

    @property
    def next_at_s(self) -> float:
        """From when on it takes a batch behind the one that it computes, while several clients ask."""
        running_s = sum([self.latencies[batch.model].of(batch.size) for batch in self.batches.values()])
        return self.free_s - early_s(running_s, self.prepare_s)

    @property
    def has_credit(self) -> bool:
        """Whether another batch may be sent to it."""
        return not self.retiring and not self.alone and len(self.batches) < _CREDITS

    def takes_more(self, now: float, *, at_once: bool) -> bool:
        """Whether a batch is sent to it, which has a credit; `at_once`: one client alone asks."""
        return not self.batches or (self.is_full(now) and (at_once or now >= self.next_at_s))

    def is_full(self, now: float) -> bool:
        """Whether a full batch waits for it: nothing less goes behind another batch."""
        return any([self.queues[model].depth >= each.ceiling(now) for model, each in self.latencies.items()])  # noqa: C419 - faster

    def done_s(self, now: float) -> float:
        """When its next batch would be done: the worker with the least of these gets the next items."""
        depths = [(self.queues[model].depth, each) for model, each in self.latencies.items()]
        return self.wait_s(now) + min([each.best_s(depth, now) for depth, each in depths if depth], default=0.0)

    def sharing(self, model: str) -> int:
        """How many models have work for it, this one included."""
        if len(self.latencies) == 1:
            return 1
        return 1 + sum([other != model and bool(self.queues[other].ahead) for other in self.latencies])

    def interrupted(self) -> None:
        """It is gone, or stood still: how late the images admitted until now are says nothing of those after them."""
        for model in self.latencies:
            self.queues[model].interruptions += 1

    def learn_preparation(self, seconds: float) -> None:
        """What it did for a batch while it computed the one before."""
        self.prepare_s += _LEARNING_RATE * (seconds - self.prepare_s)

    def begun(self) -> int:
        """How many of the batches may have begun: a device of depth 2 starts one before the one before is done."""
        depths = [self.depths.get(batch.model, 1) for batch in self.batches.values()]
        begun = min(1, len(depths))
        while begun < len(depths) and min(depths[: begun + 1]) > begun:
            begun += 1
        return begun


Serving = Sequence[tuple[WorkerState[T], BatchLatencies]]
"""The workers that take new batches of a model."""

_PROBE_S = 1.0
PROBE_BATCHES = 16
"""The shortest batches ever seen: a probe that comes too late has cost the others no more than a sixteenth."""


def expected_s(
    queue: Queue[T], workers: Serving[T], model: str, *, priority: int, images: int, now: float, ready_s: float = 0.0
) -> tuple[float | None, float]:
    """Seconds until the last of `images` is answered: by what waits alone (None without a worker), and plus recent
    lateness; admission uses the second.

    `ready_s`: how long it waits before it can come into the queue. What is ahead comes there sooner, and is computed
    meanwhile: so the longer one of the two waits counts, not both.
    """
    ahead = queue.ahead_of(priority)
    if not workers:
        return None, 0.0  # Nothing is known of the worker that will come: only the deadline itself can tell.
    if not ahead:
        idle = [latencies for worker, latencies in workers if not worker.batches]
        if idle:
            # With nothing in front of it an item is refused only if no batch was ever fast enough: an estimate that
            # has gone wrong could never get better if it kept away the work that would correct it.
            all_s = own_s = min([latencies.best_s(images, now) for latencies in idle])
            if images > 1:
                all_s = last_s([WorkerTimeline(latencies, 0.0, 1, now) for latencies in idle], images, images)
            return ready_s + all_s, ready_s + max(0.0, all_s - own_s) + min([latencies.least_s for latencies in idle])
    if len(workers) == 1:
        [(worker, latencies)] = workers
        full = latencies.ceiling(now)
        batches, rest = divmod(ahead + images - 1, full)  # Full ones go first; the last image is in the one after them.
        filled = round(queue.usual) if rest + 1 < queue.usual else rest + 1
        own_s = latencies.best_s(filled, now)
        by_queue_s = worker.wait_s(now) + own_s
        if batches:
            by_queue_s += batches * latencies.of(full) * worker.sharing(model)
    else:
        own_s = min([latencies.best_s(round(queue.usual), now) for _, latencies in workers])
        first_s = _next_s(queue, workers, ahead + images, now)
        by_queue_s = _last_s(queue, workers, model, ahead + images, now) if first_s is None else first_s
    by_queue_s = max(by_queue_s, ready_s + own_s)
    return by_queue_s, by_queue_s + queue.lateness_of(priority).seconds


def _last_s(queue: Queue[T], workers: Serving[T], model: str, images: int, now: float) -> float:
    """Seconds until the last of `images` is done by several workers that take turns."""
    timelines = [
        WorkerTimeline(latencies, worker.wait_s(now), worker.sharing(model), now) for worker, latencies in workers
    ]
    return last_s(timelines, images, round(queue.usual))


def _next_s(queue: Queue[T], workers: Serving[T], images: int, now: float) -> float | None:
    """Seconds until the next batch of any of the workers is done; None where `images` do not fit into it.

    The first step of `last_s`, which is mostly enough, for a fraction of its cost.
    """
    wanted = max(images, round(queue.usual))
    first, first_s = None, math.inf
    for worker, latencies in workers:
        done_s = latencies.best_s(wanted, now)
        if worker.free_s > now and worker.batches:
            done_s += worker.free_s - now
        if done_s < first_s:
            first, first_s = latencies, done_s
    return first_s if first is not None and images <= first.ceiling(now) else None


def rate(workers: Serving[T], model: str) -> float:
    """Images a second that the model's workers can answer, less what other models with work take of them."""
    return sum([latencies.rate / worker.sharing(model) for worker, latencies in workers])


def is_probe(queue: Queue[T], workers: Serving[T], images: int, within_s: float, now: float, *, priority: int) -> bool:
    """Whether a request of so many images that has `within_s` is let in whatever is expected of it.

    It is where nothing of its model and kind was let in for so long, and batches were once fast enough for it. What
    makes estimates higher than they were at first is halved each time, as time alone may have made it wrong.
    """
    lateness = queue.lateness_of(priority)
    if now < lateness.admitted_s + _PROBE_S:
        return False
    every = [latencies for _, latencies in workers]
    every_s = max(_PROBE_S, PROBE_BATCHES * min([each.least_s for each in every], default=0.0))
    if now < lateness.admitted_s + every_s:
        return False
    if not any(each.least_s * -(-images // each.sizes[-1]) <= within_s for each in every):
        return False
    if now >= lateness.forgot_s + every_s:
        lateness.halve(now)
        if now >= max(queue.lateness.admitted_s, queue.urgent_lateness.admitted_s) + every_s:
            for each in every:
                each.halve()
    return True
