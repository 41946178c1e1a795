"""What nothing teaches any more is tried now and then: no model is kept out. tests/virtual/test_hurry.py has pauses."""

from __future__ import annotations

from itertools import pairwise

import pytest

from app.scheduling.queue import DeadlineUnreachableError
from app.scheduling.scheduler import Scheduler
from app.scheduling.workers import PROBE_BATCHES
from tests.support.queueing import enqueue, reserve

LASTS_S = 2.0


def test_what_is_always_refused_is_tried_now_and_then_and_seldom():
    """A neighbour keeps the worker busy, and nothing of the model teaches anything."""
    scheduler = Scheduler({"m": 100, "neighbour": 100})
    scheduler.add_worker("w", {"m": {1: 0.1}, "neighbour": {1: 0.1}})
    enqueue(scheduler, reserve(scheduler, "neighbour", 1, 1e9, 0, 0.0), None, 0.0)
    assert scheduler.dispatch(0.0)[0]
    lateness = scheduler.queues["m"].lateness_of(0, "")
    for _ in range(100):
        lateness.learn(1e6, 0.0)
    assert lateness.seconds > 10 * LASTS_S
    let_in = []
    for now in (step * 0.01 for step in range(3000)):
        try:
            scheduler.release(reserve(scheduler, "m", 1, now + LASTS_S, 0, now))
        except DeadlineUnreachableError:
            assert now - let_in[-1] < PROBE_BATCHES * 0.1 + 0.011
        else:
            let_in.append(now)
        with pytest.raises(DeadlineUnreachableError):  # No batch was ever fast enough for it: not even as a try.
            reserve(scheduler, "m", 1, now + 0.09, 0, now)
    apart = [after - before for before, after in pairwise(let_in)]
    tries = apart[: apart.index(pytest.approx(0.01))]
    assert len(tries) > 3
    assert tries[:-1] == [pytest.approx(PROBE_BATCHES * 0.1, abs=0.011)] * (len(tries) - 1)
    assert apart[len(tries) :] == [pytest.approx(0.01)] * (len(apart) - len(tries)), "at last it is let in like others"


def test_what_waited_for_a_worker_that_stood_still_teaches_no_lateness():
    scheduler = Scheduler({"m": 100, "neighbour": 100})
    scheduler.add_worker("w", {"m": {1: 0.1}, "neighbour": {1: 0.1}})
    for model in ("m", "m", "neighbour"):
        enqueue(scheduler, reserve(scheduler, model, 1, 1e9, 0, 0.0), None, 0.0)
    now, sent = 8.0, scheduler.dispatch(0.0)[0]
    while sent:
        scheduler.finish("w", sent.pop(0).id, now)
        sent += scheduler.dispatch(now)[0]
        now += 0.1
    assert not any(scheduler.queues[model].in_flight + scheduler.queues[model].depth for model in ("m", "neighbour"))
    assert [scheduler.queues[model].lateness_of(0, "").seconds for model in ("m", "neighbour")] == [0.0, 0.0]


def test_what_overtakes_does_not_keep_out_what_is_refused():
    """Requests of a higher priority are let in all the while, and teach nothing of the others."""
    scheduler = Scheduler({"m": 100})
    scheduler.add_worker("w", {"m": {1: 0.1}})
    for _ in range(200):
        scheduler.queues["m"].lateness_of(0, "").learn(5 * LASTS_S, 0.0)
    let_in = 0
    for now in (step * 0.1 for step in range(200)):
        enqueue(scheduler, reserve(scheduler, "m", 1, now + LASTS_S, 1, now), None, now)
        for batch in scheduler.dispatch(now)[0]:
            try:
                scheduler.release(reserve(scheduler, "m", 1, now + LASTS_S, -1, now))
                let_in += 1
            except DeadlineUnreachableError:
                pass
            scheduler.finish("w", batch.id, now + 0.09)
    assert let_in > 100
