"""When an image that comes now would be answered, by what is known of the queue and of the workers.

Owns: this estimate alone; what follows from it is the scheduler's business (app.scheduling.scheduler). Pure logic;
times are in seconds, the clock is a parameter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from app.scheduling.batching import Ladder, Lane, last_s
from app.scheduling.queue import Queue, T
from app.scheduling.worker_state import WorkerState

Serving = Sequence[tuple[WorkerState[T], Ladder]]


def expected_s(
    queue: Queue[T],
    workers: Serving[T],
    sharing: Callable[[WorkerState[T]], int],
    *,
    priority: int,
    images: int,
    now: float,
) -> tuple[float | None, float]:
    """Seconds until the last of `images` is answered: by the queue alone (None without a worker), and plus recent
    lateness; admission uses the second. `sharing`: how many models have work for a worker.
    """
    ahead = queue.ahead_of(priority)
    if not workers:
        return None, 0.0  # Nothing is known of the worker that will come: only the deadline itself can tell.
    if not ahead:
        idle = [ladder for worker, ladder in workers if not worker.batches]
        if idle:
            # With nothing in front of it an item is refused only if no batch was ever fast enough: an estimate that
            # has gone wrong could never get better if it kept away the work that would correct it.
            all_s = own_s = min([ladder.best_s(images, now) for ladder in idle])
            if images > 1:
                all_s = last_s([Lane(ladder, 0.0, 1, now) for ladder in idle], images, images)
            return all_s, max(0.0, all_s - own_s) + min([ladder.least_s for ladder in idle])
    by_queue_s = _next_s(queue, workers, ahead + images, now)
    if by_queue_s is None:
        lanes = [Lane(ladder, worker.wait_s(now), sharing(worker), now) for worker, ladder in workers]
        by_queue_s = last_s(lanes, ahead + images, round(queue.usual))
    return by_queue_s, by_queue_s + queue.lateness_of(priority).seconds


def _next_s(queue: Queue[T], workers: Serving[T], images: int, now: float) -> float | None:
    """Seconds until the next batch of any of the workers is done; None where `images` do not fit into it.

    The first step of `last_s`, which is mostly enough, for a fraction of its cost.
    """
    wanted = max(images, round(queue.usual))
    first, first_s = None, math.inf
    for worker, ladder in workers:
        done_s = ladder.best_s(wanted, now)
        if worker.free_s > now and worker.batches:
            done_s += worker.free_s - now
        if done_s < first_s:
            first, first_s = ladder, done_s
    return first_s if first is not None and images <= first.ceiling(now) else None
