"""Scheduler's view of workers: their latencies and batch sizes, and when a new image would be answered.

Owns: a worker's batches, clocks and latencies; whether several clients ask at present, and how early a busy worker then
gets the next batch; these estimates, and the probes admitted against them. Pure logic; times are in seconds, the clock
is a parameter.

While several clients ask, the next image of each waits behind as few batches as possible. An image that comes while a
worker computes waits for the rest of that batch, for the batch already dispatched behind it, and for its own. Only the
second can be avoided: a batch that has begun cannot be stopped. So the next batch is dispatched late, with the images
that came until then, but early enough that the worker never waits for it.

Admission refuses by learned estimates, and refused requests teach nothing. A model whose requests are all refused would
keep its estimates, and be refused, while another one keeps the worker busy. So now and then a request is admitted
against the estimates, as a probe.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Generic

from app.scheduling.queue import MOST_RATE, RARE_S, Batch, Queue, Reservation, T

LEARNING_RATE = 0.2
_DRIFT = 0.01
_CREDIBLE = 3.0
_SHORTEST_S = 1e-4
_CEILING_S = 30.0
_LONGEST_CEILING_S = 600.0


class BatchLatencies:
    """Batch sizes of one model on one worker, the expected seconds of each, and the largest size usable now."""

    def __init__(self, seconds: Mapping[int, float]) -> None:
        """Start from `seconds` by batch size, as measured when the worker warmed up."""
        if not seconds or any(size < 1 or taken < 0 for size, taken in seconds.items()):
            raise ValueError("batch latencies need at least one positive size and no negative time")
        self.seconds = dict(sorted(seconds.items()))
        """Seconds expected of a batch of each size."""
        self._measured = {size: max(taken, _SHORTEST_S) for size, taken in self.seconds.items()}
        self.sizes = tuple(self.seconds)
        self.least_s = min(self.seconds.values())
        """Shortest time of any batch so far."""
        self.rate = 0.0
        """Images a second in batches of the fastest size."""
        self.most = self.sizes[-1]
        """Largest size that was usable when `ceiling` was asked last."""
        self._observed_s = self._aged_s = -math.inf  # Time of the last batch; of the last batch or `age`.
        self._usable = len(self.sizes)
        self._limited_until_s = 0.0
        self._limited_for_s = _CEILING_S
        self._best: dict[int, int] = {}  # Results of `best_size` and `best_s`, until something is learned.
        self._best_s: dict[int, float] = {}
        self._rated()

    def credible_s(self, size: int, seconds: float) -> float:
        """Return the credible part of a batch's time; in the rest of it a process or the device stood still."""
        return min(seconds, _CREDIBLE * max(self.seconds[size], _SHORTEST_S))

    def learn(self, size: int, seconds: float, now: float) -> None:
        """Move the estimate for `size` towards the time a batch just took. A stall moves it by no more than a limit."""
        self.seconds[size] += LEARNING_RATE * (self.credible_s(size, seconds) - self.seconds[size])
        # Of two results that are read at once, the second seems to have taken no time.
        self.least_s = min(self.least_s, max(seconds, self.seconds[size] / _CREDIBLE))
        # The other sizes sink towards their measured share of this one, so that a size that stalled is tried again.
        scale = self.seconds[size] / self._measured[size]
        drift = max(_DRIFT, min((now - self._observed_s) / RARE_S, MOST_RATE))
        for other in self.sizes:
            self.seconds[other] -= drift * max(0.0, self.seconds[other] - self._measured[other] * scale)
        self._observed_s = self._aged_s = now
        self._rated()

    def age(self, now: float, period_s: float) -> bool:
        """Forget half of the learned excess over the times measured at the start, for each period since the last batch
        if one has passed; return True if so.
        """
        periods = (now - self._aged_s) / period_s
        if periods < 1:
            return False
        for size, measured_s in self._measured.items():
            self.seconds[size] -= (1 - 0.5**periods) * max(0.0, self.seconds[size] - measured_s)
        self._aged_s = now
        self._rated()
        return True

    def limit(self, size: int, now: float) -> None:
        """Allow no batches above `size` for a while, then one size more at a time; each further limit lasts longer.

        At least the smallest size stays.
        """
        self._limited_for_s = min(2 * self._limited_for_s, _LONGEST_CEILING_S) if self._limited_until_s else _CEILING_S
        self._usable = max(1, sum(each <= size for each in self.sizes))
        self._limited_until_s = now + self._limited_for_s
        self._rated()

    def ceiling(self, now: float) -> int:
        """Return the largest size that may be used now."""
        if self._usable < len(self.sizes) and now >= self._limited_until_s:
            self._usable += 1
            self._limited_until_s = now + self._limited_for_s
            self._rated()
        return self.most

    def best_size(self, waiting: int, now: float) -> int:
        """Return the size that answers most items a second when `waiting` are there; the larger one when equal.

        If time grows with size (a CPU), this is the size below, without padding. If it hardly grows (a GPU), this is
        the padded size above.
        """
        if self._usable < len(self.sizes):
            self.ceiling(now)
        waiting = min(waiting, self.most)
        best = self._best.get(waiting)
        if best is None:
            place = bisect_left(self.sizes, waiting)
            best = above = self.sizes[place]
            if place and above > waiting:
                below, seconds = self.sizes[place - 1], self.seconds
                if below / max(seconds[below], 1e-9) > waiting / max(seconds[above], 1e-9):
                    best = below
            self._best[waiting] = best
        return best

    def short_size(self, now: float) -> int:
        """Return the smallest size that keeps most of the highest rate. Only the times measured at the start count:
        later estimates vary by as much as sizes differ.
        """
        rates = {size: size / self._measured[size] for size in self.sizes if size <= self.ceiling(now)}
        return next(size for size, rate in rates.items() if rate >= _RATE_KEPT * max(rates.values()))

    def best_s(self, waiting: int, now: float) -> float:
        """Return the seconds expected of the next batch when `waiting` items are there."""
        if self._usable < len(self.sizes):
            self.ceiling(now)
        seconds = self._best_s.get(waiting)
        if seconds is None:
            seconds = self._best_s[waiting] = self.seconds[self.best_size(waiting, now)]
        return seconds

    def _rated(self) -> None:
        """Clear what was computed from old estimates or sizes, and compute the rate again."""
        self._best.clear()
        self._best_s.clear()
        self.rate = max([size / max(self.seconds[size], 1e-9) for size in self.sizes[: self._usable]])
        self.most = self.sizes[self._usable - 1]


class WorkerTimeline:
    """Timeline of a worker for an image in the queue: one full batch after the other, from `start_s` on."""

    __slots__ = ("full", "latencies", "now", "start_s", "step_s")

    def __init__(self, latencies: BatchLatencies, start_s: float, models: int, now: float) -> None:
        """Start `start_s` seconds after `now`; `models` models have work for the worker and take turns."""
        self.latencies = latencies
        self.start_s = start_s
        self.now = now
        self.full = latencies.ceiling(now)
        self.step_s = max(latencies.seconds[self.full], 1e-9) * models

    def done_s(self, images: int) -> float:
        """Return when a batch of up to `images` images would be done, if it were the next one."""
        return self.start_s + self.latencies.best_s(images, self.now)

    def skip(self, batches: int) -> int:
        """Let so many full batches go first; return the number of their images."""
        self.start_s += batches * self.step_s
        return batches * self.full


def last_s(workers: Sequence[WorkerTimeline], images: int, usual: int) -> float:
    """Return the seconds until the last of `images` is done. Batches are full; the last has at least `usual` images."""
    spare = images - 2 * sum([worker.full for worker in workers])
    if spare > 0:  # All but the last few batches at once, so that a long queue costs no more than a short one.
        spare_s = spare / sum([worker.full / worker.step_s for worker in workers])
        images -= sum([worker.skip(int(spare_s / worker.step_s)) for worker in workers])
    while True:
        wanted = max(images, usual)
        first, first_s = workers[0], workers[0].done_s(wanted)
        for worker in workers[1:]:
            done_s = worker.done_s(wanted)
            if done_s < first_s:
                first, first_s = worker, done_s
        if images <= first.full:
            return first_s
        images -= first.skip(1)


_REMEMBERED_S = 1.0
"""Longest time between the requests of two clients that share; sharing lasts as long after the second one."""
_EARLY_S = 0.004
"""Margin for the event loop, the socket, and the error of a batch's estimate."""
_EARLY_SHARE = 0.15
"""Share of a batch's time that is added: a worker that overlaps batches looks for the next one that early."""
_PREPARATIONS = 2.0
_RATE_KEPT = 0.97
"""Share of the highest rate, in images a second, that shorter batches must keep while several clients ask."""


class Sharing:
    """Record of whether several clients asked recently."""

    __slots__ = ("_client", "_seen_s", "until_s")

    def __init__(self) -> None:
        self._client, self._seen_s = "", -math.inf
        self.until_s = -math.inf
        """Time until which several clients ask."""

    def asked(self, client: str, now: float) -> None:
        """Note that a client asks; "" if unknown."""
        if client != self._client:
            if now < self._seen_s + _REMEMBERED_S:
                self.until_s = now + _REMEMBERED_S
            self._client = client
        self._seen_s = now


def early_s(batch_s: float, prepare_s: float) -> float:
    """Return how long before the end of a batch of `batch_s` the next is dispatched; `prepare_s`: preparation time."""
    return _EARLY_S + _EARLY_SHARE * batch_s + _PREPARATIONS * prepare_s


class WorkerState(Generic[T]):
    """Worker's batches and clocks, its known speed, and the queues of its models.

    `depths`: for each model, the most batches that the device has begun at once; `leaving`: models that get no more
    batches, and finish those in flight.
    """

    def __init__(
        self,
        name: str,
        latencies: Mapping[str, BatchLatencies],
        queues: Mapping[str, Queue[T]],
        depths: Mapping[str, int],
    ) -> None:
        self.name, self.latencies, self.queues, self.depths = name, latencies, queues, depths
        self.served_s = dict.fromkeys(latencies, 0.0)
        self.clock_s = self.finished_s = 0.0
        self.free_s = 0.0  # When all that is in flight is expected to be done.
        self.prepare_s = 0.0  # Seconds to prepare a batch while it computes the one before.
        self.retiring = False
        self.leaving: set[str] = set()
        self.alone = False  # It has an item that must be its only one.
        self.batches: dict[int, Batch[T]] = {}

    def turn_s(self, model: str) -> float:
        """Return the model's virtual time on the worker. Idleness earns no credit: the least is the worker's clock."""
        return max(self.clock_s, self.served_s[model])

    def wait_s(self, now: float) -> float:
        """Return the seconds until all that is in flight should be done."""
        return self.free_s - now if self.batches and self.free_s > now else 0.0

    @property
    def next_at_s(self) -> float:
        """Return the time from which a busy worker takes the next batch while several clients ask."""
        running_s = sum([self.latencies[batch.model].seconds[batch.size] for batch in self.batches.values()])
        return self.free_s - early_s(running_s, self.prepare_s)

    def is_full(self, now: float) -> bool:
        """Return True if a full batch waits for it: a partial batch never goes behind another batch."""
        return any([self.queues[model].depth >= each.ceiling(now) for model, each in self.latencies.items()])  # noqa: C419 - faster

    def done_s(self, now: float) -> float:
        """Return the seconds until its next batch would be done: the worker with the least gets the next items."""
        depths = [(self.queues[model].depth, each) for model, each in self.latencies.items()]
        return self.wait_s(now) + min([each.best_s(depth, now) for depth, each in depths if depth], default=0.0)

    def sharing(self, model: str) -> int:
        """Return how many models have work for it, this one included."""
        if len(self.latencies) == 1:
            return 1
        return 1 + sum([other != model and bool(self.queues[other].ahead) for other in self.latencies])

    def interrupted(self) -> None:
        """Note that it is gone or stood still: lateness of images admitted before predicts nothing for later ones."""
        for model in self.latencies:
            self.queues[model].interruptions += 1

    def begun(self) -> int:
        """Return how many batches may have begun: a device of depth 2 starts one before the previous is done."""
        depths = [self.depths.get(batch.model, 1) for batch in self.batches.values()]
        begun = min(1, len(depths))
        while begun < len(depths) and min(depths[: begun + 1]) > begun:
            begun += 1
        return begun


Serving = Sequence[tuple[WorkerState[T], BatchLatencies]]
"""Workers that take new batches of a model, with their latencies."""

_PROBE_S = 1.0
PROBE_BATCHES = 16
"""Shortest batches between probes: a probe that comes too late has cost the others at most a sixteenth."""


def expected_s(
    queue: Queue[T], workers: Serving[T], asked: Reservation, images: int, *, now: float, ready_s: float
) -> tuple[float | None, float]:
    """Return the seconds until the last of `images` is answered: by the queue alone (None without a worker), and with
    recent lateness. Admission uses the second. `asked`: the request; `images`: all of its images, or its first ones.

    Of the images that wait, those count that go before the last of `images` by their rank, not by their arrival.
    `ready_s`: seconds before it can enter the queue. The items ahead enter earlier, and are computed meanwhile: so the
    longer of the two waits counts, not their sum.
    """
    model, client, priority, ahead = asked.model, asked.client, asked.priority, 0
    if queue.ahead:
        ahead = queue.ahead_of(client, images, priority, now, image_s(workers, model) if queue.depth else 0.0)
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
            by_queue_s += batches * latencies.seconds[full] * worker.sharing(model)
    else:
        own_s = min([latencies.best_s(round(queue.usual), now) for _, latencies in workers])
        first_s = _next_s(queue, workers, ahead + images, now)
        if first_s is None:
            timelines = [
                WorkerTimeline(each, worker.wait_s(now), worker.sharing(model), now) for worker, each in workers
            ]
            first_s = last_s(timelines, ahead + images, round(queue.usual))
        by_queue_s = first_s
    by_queue_s = max(by_queue_s, ready_s + own_s)
    return by_queue_s, by_queue_s + queue.lateness_of(priority, client, answered=True).seconds


def _next_s(queue: Queue[T], workers: Serving[T], images: int, now: float) -> float | None:
    """Return the seconds until the next batch of any worker is done; None if `images` do not fit into it.

    This is the first step of `last_s`. It mostly suffices, for a fraction of the cost.
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


def image_s(workers: Serving[T], model: str) -> float:
    """Return the seconds of all the model's workers together for an image, beside other models with work; 0 without a
    worker.
    """
    images_per_s = 0.0
    for worker, latencies in workers:
        images_per_s += latencies.rate / worker.sharing(model)
    return 1 / images_per_s if images_per_s else 0.0


def probe_s(workers: Serving[T]) -> float:
    """Return the seconds between probes, and after which an estimate forgets that hears nothing."""
    return max(_PROBE_S, PROBE_BATCHES * min([latencies.least_s for _, latencies in workers], default=0.0))


def age(queue: Queue[T], workers: Serving[T], asked: Reservation, now: float) -> bool:
    """Let estimates forget that refuse a request and have had no answer: time alone may have made them wrong. Return
    True if one did.
    """
    every_s = probe_s(workers)
    aged = queue.lateness_of(asked.priority, asked.client, answered=True).age(now, every_s)
    for worker, latencies in workers:
        if not any(batch.model == asked.model for batch in worker.batches.values()):
            aged = latencies.age(now, every_s) or aged
    return aged


def is_probe(queue: Queue[T], workers: Serving[T], asked: Reservation, within_s: float, now: float) -> bool:
    """Return True if a request that has `within_s` is admitted as a probe, against the estimates.

    True if nothing of its model and kind was admitted for so long, and batches were once fast enough for it.
    """
    if now < queue.lateness_of(asked.priority, asked.client).admitted_s + probe_s(workers):
        return False
    return any(each.least_s * -(-asked.images // each.sizes[-1]) <= within_s for _, each in workers)
