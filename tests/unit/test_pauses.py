"""Pauses of the worker, of the decoders, of the server, of all of them: no model is kept out afterwards.

A service made of numbers: clients that ask again as soon as they hear something, with deadlines; decoders that take a
moment; the scheduler; one worker.
"""

from __future__ import annotations

import heapq
import random
from itertools import count, pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from app.scheduling.queue import DeadlineUnreachableError
from app.scheduling.scheduler import Scheduler
from app.scheduling.workers import PROBE_BATCHES
from tests.support.queueing import enqueue, reserve

LASTS_S = 2.0
DECODE_S = 0.002
RETRY_S = 0.02
BEFORE_S, SETTLES_S, AFTER_S = 5.0, 5.0, 5.0
WHOLE = {"worker", "decoders", "server"}


class Service:
    """`models`: by name, seconds a batch and clients. `pauses`: when, for how long, and of what."""

    def __init__(self, models, pauses, seed=1):
        self.random = random.Random(seed)
        self.models, self.pauses = models, pauses
        self.scheduler = Scheduler(dict.fromkeys(models, 100))
        self.scheduler.add_worker("w", {name: {1: batch_s, 4: batch_s} for name, (batch_s, _) in models.items()})
        self.free_s = self.now = 0.0
        self.answers, self.refused, self.batches = [], [], []
        self._events, self._order = [], count()
        for name, (_, clients) in models.items():
            for _ in range(clients):
                self._at(self.random.random() * 0.1, self._ask, name)

    def _at(self, when, what, *given):
        heapq.heappush(self._events, (when, next(self._order), what, given))

    def _later(self, what, begin_s, seconds):
        """When so many seconds of work are done that begin then."""
        end_s = begin_s + seconds
        for paused_s, lasts_s, of in self.pauses:
            if what in of and paused_s < end_s and begin_s < paused_s + lasts_s:
                end_s += paused_s + lasts_s - max(begin_s, paused_s)
        return end_s

    def run(self, until_s):
        while self._events and self._events[0][0] < until_s:
            when, _, what, given = heapq.heappop(self._events)
            self.now = max(self.now, self._later("server", when, 0.0))
            what(*given)
            batches, dropped = self.scheduler.dispatch(self.now)
            for item in dropped:
                self._at(self.now, self._ask, item.model)
            for batch in batches:
                batch_s = self.models[batch.model][0] * self.random.uniform(0.95, 1.05)
                self.free_s = self._later("worker", max(self.now, self.free_s), batch_s)
                self._at(self.free_s, self._done, batch)
        return self

    def _ask(self, model):
        deadline_s = self.now + LASTS_S
        try:
            reservation = reserve(self.scheduler, model, 1, deadline_s, 0, self.now)
        except DeadlineUnreachableError:
            self.refused.append((self.now, model))
            self._at(self.now + RETRY_S, self._ask, model)
            return
        self._at(self._later("decoders", self.now, DECODE_S), self._decoded, reservation)

    def _decoded(self, reservation):
        if self.now >= reservation.deadline_s:
            self._ask(reservation.model)
        else:
            self._at(reservation.deadline_s, self._expire, enqueue(self.scheduler, reservation, None, self.now))
        self.scheduler.release(reservation)

    def _expire(self, item):
        if self.scheduler.discard(item):
            self._at(self.now, self._ask, item.model)

    def _done(self, batch):
        self.scheduler.finish("w", batch.id, self.now)
        self.batches.append((self.now, batch.model))
        for item in batch.items:
            if self.now <= item.deadline_s:
                self.answers.append((self.now, batch.model))
            self._at(self.now, self._ask, batch.model)

    def rate(self, what, model, begin_s, end_s):
        return sum(begin_s < when <= end_s and each == model for when, each in what) / (end_s - begin_s)


def paused(models, pauses):
    """Run the service; return it, and the time at which it must have recovered from the last pause."""
    begin_s, settled_s = BEFORE_S, BEFORE_S
    timed = []
    for apart_s, lasts_s, of in pauses:
        timed.append((begin_s + apart_s, lasts_s, of))
        begin_s = settled_s = begin_s + apart_s + lasts_s
    return Service(models, timed).run(settled_s + SETTLES_S + AFTER_S), settled_s + SETTLES_S


def assert_over(service, settled_s):
    """Each model is answered as before; it waits for no more batches of the others than their shares explain."""
    end_s = settled_s + AFTER_S
    for name in service.models:
        before = service.rate(service.answers, name, BEFORE_S / 2, BEFORE_S)
        after = service.rate(service.answers, name, settled_s, end_s)
        assert after >= 0.8 * before, (name, before, after)
        assert service.rate(service.refused, name, settled_s, end_s) <= 0.05 * after
        others = most = 0
        for when, model in service.batches:
            if when > settled_s:
                others = 0 if model == name else others + 1
                most = max(most, others)
        slowest_s, fastest_s = (each(batch_s for batch_s, _ in service.models.values()) for each in (max, min))
        assert most <= (len(service.models) + 1) * (slowest_s / fastest_s + 1), (name, most)


PARTS = [{"worker"}, {"decoders"}, {"server"}, WHOLE]


@pytest.mark.parametrize("of", PARTS, ids=lambda of: " and ".join(sorted(of)))
@pytest.mark.parametrize("lasts_s", [2.0, 8.0, 20.0])
@pytest.mark.parametrize(
    "models",
    [{"a": (0.02, 16), "b": (0.02, 16)}, {"a": (0.08, 8), "b": (0.02, 8), "c": (0.02, 8)}],
    ids=["two", "three"],
)
def test_after_a_pause_each_model_is_answered_as_before(models, lasts_s, of):
    assert_over(*paused(models, [(0.0, lasts_s, of)]))


@settings(deadline=None, derandomize=True, max_examples=60)
@given(
    st.dictionaries(
        st.sampled_from("abc"), st.tuples(st.sampled_from([0.005, 0.02, 0.08]), st.integers(1, 8)), min_size=2
    ),
    st.lists(st.tuples(st.floats(0.0, 4.0), st.floats(0.1, 20.0), st.sampled_from(PARTS)), min_size=1, max_size=6),
)
@example({"a": (0.02, 8), "b": (0.02, 8)}, [(0.01 * number, 3.0, {"worker"}) for number in range(6)])
def test_whatever_the_pauses_no_model_stays_refused_or_waits_for_many_batches(models, pauses):
    assert_over(*paused(models, pauses))


@pytest.mark.parametrize("of", PARTS, ids=lambda of: " and ".join(sorted(of)))
@pytest.mark.parametrize("lasts_s", [2.0, 8.0])
def test_a_slow_device_refuses_hardly_anything_three_seconds_after_a_pause(lasts_s, of):
    service, settled_s = paused({"m": (0.08, 16)}, [(0.0, lasts_s, of)])
    began_s = settled_s - SETTLES_S + 3.0
    asked = len([when for when, _ in (*service.answers, *service.refused) if when > began_s])
    assert asked > 100
    assert len([when for when, _ in service.refused if when > began_s]) <= 0.05 * asked


def test_what_is_always_refused_is_tried_now_and_then_and_seldom():
    """A neighbour keeps the worker busy, and nothing of the model teaches anything."""
    scheduler = Scheduler({"m": 100, "neighbour": 100})
    scheduler.add_worker("w", {"m": {1: 0.1}, "neighbour": {1: 0.1}})
    enqueue(scheduler, reserve(scheduler, "neighbour", 1, 1e9, 0, 0.0), None, 0.0)
    assert scheduler.dispatch(0.0)[0]
    lateness = scheduler.queues["m"].lateness
    for _ in range(100):
        lateness.learn(1e6)
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
    assert tries == [pytest.approx(PROBE_BATCHES * 0.1, abs=0.011)] * len(tries)
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
    assert [scheduler.queues[model].lateness.seconds for model in ("m", "neighbour")] == [0.0, 0.0]


def test_clients_that_ask_gently_after_an_overload_of_the_decoders_are_let_in():
    """Two that ask now and then: the second of them is not refused because others waited for the decoders before."""
    scheduler = Scheduler({"m": 100})
    scheduler.add_worker("w", {"m": {1: 0.01}})
    lateness = scheduler.queues["m"].lateness
    for _ in range(200):
        lateness.learn(1.5 * LASTS_S)
    refused = 0
    for now in range(100):
        reservations = []
        for begun_s in (0.0, 0.02):
            try:
                reservations.append(reserve(scheduler, "m", 1, now + begun_s + LASTS_S, 0, now + begun_s))
            except DeadlineUnreachableError:
                refused += 1
        for reservation, decoded_s in zip(reservations, (0.05, 0.07), strict=False):
            enqueue(scheduler, reservation, None, now + decoded_s)
            [batch], dropped = scheduler.dispatch(now + decoded_s)
            assert not dropped
            scheduler.finish("w", batch.id, now + decoded_s + 0.01)
    assert refused <= 3


def test_what_overtakes_does_not_keep_out_what_is_refused():
    """Requests of a higher priority are let in all the while, and teach nothing of the others."""
    scheduler = Scheduler({"m": 100})
    scheduler.add_worker("w", {"m": {1: 0.1}})
    for _ in range(200):
        scheduler.queues["m"].lateness.learn(5 * LASTS_S)
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
