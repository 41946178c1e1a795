"""When an image that comes now would be answered, and which one is let in although that is too late.

Owns: these two estimates; what follows from them is the scheduler's business (app.scheduling.scheduler). Pure logic;
times are in seconds, the clock is a parameter. Admission refuses by what it has learned, and what it refuses teaches
nothing: a model of which everything is refused would keep its estimates, and be refused, for as long as another one
keeps the worker busy. So a request is let in now and then although the estimates say no.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from app.scheduling.batching import BatchLatencies, WorkerTimeline, last_s
from app.scheduling.queue import Queue, T
from app.scheduling.worker_state import WorkerState

Serving = Sequence[tuple[WorkerState[T], BatchLatencies]]
"""The workers that take new batches of a model."""

_PROBE_S = 1.0
PROBE_BATCHES = 16
"""The shortest batches ever seen: a probe that comes too late has cost the others no more than a sixteenth."""


def expected_s(
    queue: Queue[T], workers: Serving[T], model: str, *, priority: int, images: int, now: float
) -> tuple[float | None, float]:
    """Seconds until the last of `images` is answered: by the queue alone (None without a worker), and plus recent
    lateness; admission uses the second.
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
            return all_s, max(0.0, all_s - own_s) + min([latencies.least_s for latencies in idle])
    by_queue_s = _next_s(queue, workers, ahead + images, now)
    if by_queue_s is None:
        timelines = [
            WorkerTimeline(latencies, worker.wait_s(now), worker.sharing(model), now) for worker, latencies in workers
        ]
        by_queue_s = last_s(timelines, ahead + images, round(queue.usual))
    return by_queue_s, by_queue_s + queue.lateness_of(priority).seconds


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
