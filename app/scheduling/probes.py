"""Requests that are let in although the estimates say no: what is never tried can never be found to have become better.

Owns: when such a request is due, and what is forgotten until then. Pure logic; times are in seconds, the clock is a
parameter. Admission refuses by what it has learned, and what it refuses teaches nothing: a model of which everything is
refused would keep its estimates, and be refused, for as long as another one keeps the worker busy.
"""

from __future__ import annotations

from app.scheduling.expectation import Serving
from app.scheduling.queue import Queue, T

_EVERY_S = 1.0
EVERY_BATCHES = 16
"""The shortest batches ever seen: a probe that comes too late has cost the others no more than a sixteenth."""


def is_due(queue: Queue[T], workers: Serving[T], images: int, within_s: float, now: float, *, priority: int) -> bool:
    """Whether a request of so many images that has `within_s` is let in whatever is expected of it.

    It is where nothing of its model and kind was let in for so long, and batches were once fast enough for it. What
    makes estimates higher than they were at first is halved each time, as time alone may have made it wrong.
    """
    lateness = queue.lateness_of(priority)
    if now < lateness.admitted_s + _EVERY_S:
        return False
    ladders = [ladder for _, ladder in workers]
    every_s = max(_EVERY_S, EVERY_BATCHES * min([ladder.least_s for ladder in ladders], default=0.0))
    if now < lateness.admitted_s + every_s:
        return False
    if not any(ladder.least_s * -(-images // ladder.sizes[-1]) <= within_s for ladder in ladders):
        return False
    if now >= lateness.forgot_s + every_s:
        lateness.halve(now)
        if now >= max(queue.lateness.admitted_s, queue.urgent_lateness.admitted_s) + every_s:
            for ladder in ladders:
                ladder.halve()
    return True
