"""Estimates of time: batch latencies by size, and lateness of answers against the expectation.

Owns: the estimates and the batch size that follows from them. Pure logic; times are in seconds, the clock is a
parameter. Must not know queues or workers.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence

_REMEMBERED_S = 5.0
_MOST_RATE = 0.125
_LEARNING_RATE = 0.2
_DRIFT = 0.01
_CREDIBLE = 3.0
_FAR = 4.0
_SHORTEST_S = 1e-4
_CEILING_S = 30.0
_LONGEST_CEILING_S = 600.0


def _rate(least: float, since_s: float) -> float:
    """Return the share by which an estimate moves towards an answer `since_s` seconds after the last one: more if they
    are rare, so that their number does not matter.
    """
    return max(least, min(since_s / _REMEMBERED_S, _MOST_RATE))


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
        self._heard_s = self._aged_s = -math.inf  # Time of the last batch; of the last batch or `age`.
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
        self.seconds[size] += _LEARNING_RATE * (self.credible_s(size, seconds) - self.seconds[size])
        # Of two results that are read at once, the second seems to have taken no time.
        self.least_s = min(self.least_s, max(seconds, self.seconds[size] / _CREDIBLE))
        # The other sizes sink towards their measured share of this one, so that a size that stalled is tried again.
        scale = self.seconds[size] / self._measured[size]
        drift = _rate(_DRIFT, now - self._heard_s)
        for other in self.sizes:
            self.seconds[other] -= drift * max(0.0, self.seconds[other] - self._measured[other] * scale)
        self._heard_s = self._aged_s = now
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
        return self.sizes[self._usable - 1]

    def best_size(self, waiting: int, now: float) -> int:
        """Return the size that answers most items a second when `waiting` are there; the larger one when equal.

        If time grows with size (a CPU), this is the size below, without padding. If it hardly grows (a GPU), this is
        the padded size above.
        """
        ceiling = self.ceiling(now)
        waiting = min(waiting, ceiling)
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

    def short_size(self, rate_kept: float, now: float) -> int:
        """Return the smallest size that answers at least this share of the most images a second. Only the times
        measured at the start count: later estimates vary by as much as sizes differ.
        """
        rates = {size: size / self._measured[size] for size in self.sizes if size <= self.ceiling(now)}
        return next(size for size, rate in rates.items() if rate >= rate_kept * max(rates.values()))

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
        self.rate = max(size / max(self.seconds[size], 1e-9) for size in self.sizes[: self._usable])


class Lateness:
    """Delay of answers beyond the queue's wait: decoding, the event loop, the pipe, other processes.

    Mean and deviation follow TCP's estimate of round trips (RFC 6298), but move more slowly while answers are many:
    under overload every dip admits a crowd. Rare answers count more, so that what was learned is forgotten in seconds,
    however few they are. An outlier moves them by no more than a limit: one late answer after a pause predicts nothing.
    `seconds`: add this to an expectation, and most answers come before it. `admitted_s`: last admission whose answer
    will teach this estimate.
    """

    _MEAN_RATE = 1 / 32
    _DEVIATIONS = 4.0
    _CREDIBLE = 3.0
    _ALWAYS_CREDIBLE_S = 0.1

    def __init__(self) -> None:
        self.admitted_s = self._aged_s = self._heard_s = -math.inf
        self._mean_s = 0.0
        self._deviation_s = 0.0
        self.seconds = 0.0

    @property
    def has_heard(self) -> bool:
        """True once an answer has taught it."""
        return self._heard_s > -math.inf

    def learn(self, seconds: float, now: float, *, alone: bool = False) -> None:
        """Learn from an answer that came `seconds` later (negative: earlier) than expected. `alone`: nothing else was
        in flight at its admission; if such an answer comes far earlier than this estimate, forget half of the estimate.
        """
        most_s = max(self._CREDIBLE * self._deviation_s, self._ALWAYS_CREDIBLE_S)
        off_s = min(seconds - self._mean_s, most_s)
        rate = _rate(self._MEAN_RATE, now - self._heard_s)
        self._heard_s = self._aged_s = now
        self._deviation_s += 2 * rate * (min(abs(off_s), most_s) - self._deviation_s)
        self._mean_s += rate * off_s
        self._learned()
        if alone and self.seconds > max(_FAR * seconds, self._ALWAYS_CREDIBLE_S):
            self._keep(0.5)

    def age(self, now: float, period_s: float) -> bool:
        """Forget half of the estimate for each period since the last answer, if one has passed; return True if so."""
        periods = (now - self._aged_s) / period_s
        if periods < 1:
            return False
        self._keep(0.5**periods)
        self._aged_s = now
        return True

    def _keep(self, share: float) -> None:
        self._mean_s *= share
        self._deviation_s *= share
        self._learned()

    def _learned(self) -> None:
        self.seconds = max(0.0, self._mean_s + self._DEVIATIONS * self._deviation_s)


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
