"""The scheduler, with a clock made of numbers."""

import heapq
import random
from collections import Counter
from itertools import count

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from app.scheduling import workers as sharing
from app.scheduling.queue import (
    PRIORITY_WORTH_S,
    Attempt,
    DeadlineUnreachableError,
    Item,
    LostBatches,
    NeverRoomError,
    QueueFullError,
    Reservation,
)
from app.scheduling.scheduler import WAY_BACK, Scheduler

LINEAR = {1: 0.010, 2: 0.019, 4: 0.037, 8: 0.072}  # A CPU: twice the images, nearly twice the time.
FLAT = {1: 0.010, 2: 0.010, 4: 0.011, 8: 0.012}  # A GPU: the time hardly grows.
NEVER = 1e9


def make(limits=None, ladder=LINEAR, workers=("w",), **options):
    limits = limits or {"m": 100}
    scheduler = Scheduler(limits, **options)
    for worker in workers:
        scheduler.add_worker(worker, dict.fromkeys(limits, ladder))
    return scheduler


class Image(Item):
    model = property(lambda self: self.reservation.model)
    deadline_s = property(lambda self: self.reservation.deadline_s)
    priority = property(lambda self: self.reservation.priority)
    alone = property(lambda self: self.attempt is Attempt.ALONE)


def reserve(scheduler, model, images, deadline_s, priority, now, *, client="", found_s=None):
    """Reserve room for so many images; `found_s`: time and result of a `check`."""
    reservation = Reservation(model, images, priority, deadline_s, client)
    if found_s is not None:
        reservation.admitted_s, reservation.expected_s = found_s
    scheduler.reserve(reservation, now)
    return reservation


def enqueue(scheduler, reservation, now, position=0):
    image = Image(reservation, position)
    scheduler.enqueue(image, now)
    return image


def requeue(scheduler, image, *, alone):
    """Requeue an image of a lost batch; `alone`: it may have been the reason."""
    if alone:
        image.attempt = Attempt.ALONE
    scheduler.requeue(image)


def put(scheduler, images, model="m", now=0.0, deadline=NEVER, priority=0, client=""):
    """So many requests of one image each."""
    return [
        enqueue(scheduler, reserve(scheduler, model, 1, deadline, priority, now, client=client), now)
        for _ in range(images)
    ]


def dispatch(scheduler, now=0.0):
    return scheduler.dispatch(now)[0]


def items_of(batches):
    return [item for batch in batches for item in batch.items]


# Batches


def test_an_idle_worker_waits_for_a_fuller_batch_only_when_told_to():
    scheduler = make(max_wait_s=0.005)
    put(scheduler, 3, now=1.0)
    assert dispatch(scheduler, 1.001) == []
    assert scheduler.wake_at(1.001) == pytest.approx(1.005)
    assert len(items_of(dispatch(scheduler, 1.005))) == 2


def test_nobody_is_woken_for_what_only_another_event_can_send():
    scheduler = make({"a": 9, "b": 9}, workers=(), max_wait_s=0.005)
    scheduler.add_worker("only a", {"a": {1: 0.1, 2: 0.1}})
    put(scheduler, 1, "b")
    assert dispatch(scheduler, 1.0) == []
    assert scheduler.wake_at(1.0) is None, "no worker serves b"
    put(scheduler, 1, "a", now=1.0)
    assert dispatch(scheduler, 1.0) == []
    assert scheduler.wake_at(1.0) == pytest.approx(1.005)


# Bounds


def test_the_queue_is_bounded_exactly_and_reservations_count():
    scheduler = make({"m": 5}, workers=())
    put(scheduler, 2)
    reservation = reserve(scheduler, "m", 3, NEVER, 0, 0.0)
    with pytest.raises(QueueFullError, match="5 of 5"):
        reserve(scheduler, "m", 1, NEVER, 0, 0.0)
    scheduler.release(reservation)
    assert put(scheduler, 3)
    with pytest.raises(QueueFullError):
        reserve(scheduler, "m", 1, NEVER, 0, 0.0)


# Deadlines


def enough(seconds):
    """Return a deadline for what takes so long, the answer's way back included."""
    return seconds / (1 - WAY_BACK)


def test_a_twenty_fifth_of_the_time_is_for_the_way_back():
    scheduler = make(ladder={1: 1.0})
    with pytest.raises(DeadlineUnreachableError):
        reserve(scheduler, "m", 1, 1.04, 0, 0.0)
    reserve(scheduler, "m", 1, 1.05, 0, 0.0)


def test_what_waits_and_what_runs_counts_against_a_deadline():
    scheduler = make(ladder={1: 0.1})
    put(scheduler, 4)
    dispatch(scheduler)
    scheduler.check(Reservation("m", 1, 0, enough(0.51)), 0.0)
    with pytest.raises(DeadlineUnreachableError) as refusal:
        scheduler.check(Reservation("m", 1, 0, enough(0.49)), 0.0)
    assert refusal.value.expected_s == pytest.approx(0.5)
    with pytest.raises(DeadlineUnreachableError):
        scheduler.check(Reservation("m", 2, 0, enough(0.51)), 0.0)
    scheduler.check(Reservation("m", 1, 0, enough(0.51)), 0.005)


def test_what_was_found_a_moment_ago_is_not_looked_for_again():
    scheduler = make({"m": 10}, ladder={1: 0.1})
    found_s = 0.0, scheduler.check(Reservation("m", 1, 0, enough(0.15)), 0.0)
    put(scheduler, 1)
    # By now the queue would refuse it: what was found decides, for a moment and for one image.
    assert reserve(scheduler, "m", 1, enough(0.15), 0, 0.0005, found_s=found_s).expected_s == pytest.approx(0.1)
    for images, now, found in ((2, 0.0, found_s), (1, 0.0, None), (1, 0.002, found_s)):
        with pytest.raises(DeadlineUnreachableError):
            reserve(scheduler, "m", images, enough(0.15), 0, now, found_s=found)
    put(scheduler, 8)
    with pytest.raises(QueueFullError):
        reserve(scheduler, "m", 1, enough(0.15), 0, 0.0, found_s=found_s)


@pytest.mark.parametrize("others", [1, 0])
def test_a_hopeless_item_is_dropped_when_others_can_use_its_place_and_else_tried(others):
    scheduler = make(ladder={1: 0.1}, workers=())
    hopeless, fine = put(scheduler, 1, deadline=0.09), put(scheduler, others, deadline=1.0)
    scheduler.add_worker("w", {"m": {1: 0.1}})
    batches, dropped = scheduler.dispatch(0.0)
    assert (items_of(batches), dropped) == ((fine, hopeless) if others else (hopeless, []))


def test_the_drain_time_follows_from_what_waits_and_how_fast_it_goes():
    scheduler = make(ladder={1: 0.1})
    put(scheduler, 10)
    assert scheduler.drain_time_s("m") == pytest.approx(1.0)
    dispatch(scheduler)
    assert scheduler.drain_time_s("m") == pytest.approx(1.0)
    assert Scheduler({"m": 1}).drain_time_s("m") == float("inf")


# Priority and sharing


def test_waiting_long_enough_beats_priority_and_not_a_moment_less():
    for waited_s, first in ((2 * PRIORITY_WORTH_S - 0.01, 2), (2 * PRIORITY_WORTH_S + 0.01, 0)):
        scheduler = make(ladder={1: 0.01})
        put(scheduler, 1, now=0.0)
        put(scheduler, 1, now=waited_s, priority=2)
        assert items_of(dispatch(scheduler, waited_s))[0].priority == first


def test_models_share_a_worker_by_device_time_not_by_requests():
    scheduler, taken_s = Scheduler({"slow": 10_000, "fast": 10_000}), {"slow": 0.1, "fast": 0.01}
    scheduler.add_worker("w", {model: {1: seconds} for model, seconds in taken_s.items()})
    put(scheduler, 400, "slow")
    put(scheduler, 1100, "fast")
    got, waiting = Counter(), dispatch(scheduler)
    while sum(got.values()) < 20:
        batch = waiting.pop(0)
        got[batch.model] += taken_s[batch.model]
        scheduler.finish("w", batch.id, sum(got.values()))
        waiting += dispatch(scheduler, sum(got.values()))
    assert got["slow"] == pytest.approx(got["fast"], abs=0.3)


@pytest.mark.parametrize("alone", [False, True])
def test_a_partial_batch_of_one_model_is_not_overtaken_for_ever_by_full_ones_of_another(alone):
    scheduler = make({"a": 1000, "b": 1000})
    put(scheduler, 500, "a")
    waiting = dispatch(scheduler)
    [item] = put(scheduler, 1, "b")
    if alone:
        scheduler.discard(item)
        requeue(scheduler, item, alone=True)
    now, overtaken = 0.0, 0
    while item not in waiting[0].items:
        overtaken += 1
        now += 0.072
        scheduler.finish("w", waiting.pop(0).id, now)
        waiting += dispatch(scheduler, now)
    assert overtaken <= 3


# Simulations: discrete events


class Crowd:
    """A scheduler, its worker and a clock; clients that ask for one image after the other: 64 requests of a greedy one
    at a time, one of a modest one. `answered` counts images, `modest_s` has the seconds of the modest client's.
    """

    def __init__(self, ladder, noise, pause_s):
        self.random, self.ladder, self.noise, self.pause_s = random.Random(1), ladder, noise, pause_s
        self.scheduler = make({"m": 10_000}, ladder)
        self.free_s = self.woken_s = 0.0
        self.answered, self.modest_s = 0, []
        self._events, self._order = [], count()
        for client in 64 * ["greedy"]:
            self.at(0.0, self.ask, client)
        self.at(1.0, self.ask, "modest")

    def at(self, now, what, *arguments):
        heapq.heappush(self._events, (now, next(self._order), what, arguments))

    def ask(self, now, client):
        put(self.scheduler, 1, now=now, client=client)

    def run(self, until_s):
        while self._events[0][0] < until_s:
            now, _, what, arguments = heapq.heappop(self._events)
            what(now, *arguments)
            for batch in dispatch(self.scheduler, now):
                taken_s = self.ladder[batch.size] * max(0.5, self.random.gauss(1, self.noise))
                self.free_s = max(now, self.free_s) + taken_s
                self.at(self.free_s, self._finish, batch)
            wake_s = self.scheduler.wake_at(now)
            if wake_s is not None and wake_s != self.woken_s:
                self.woken_s = wake_s
                self.at(max(now + 0.001, wake_s), lambda _: None)  # As the event loop's timers are.
        return self

    def _finish(self, now, batch):
        self.scheduler.finish(batch.worker, batch.id, now)
        self.answered += len(batch.items)
        for item in batch.items:
            client = item.reservation.client
            self.scheduler.release(item.reservation)
            if client == "modest":
                self.modest_s.append(now - item.queued_s)
                self.at(now + self.random.uniform(*self.pause_s), self.ask, client)
            else:
                self.at(now + 0.001, self.ask, client)


CONSTANT = dict.fromkeys((1, 2, 4, 8), 0.02)


@pytest.mark.parametrize("pause_s", [(0.001, 0.001), (0.0, 0.1)], ids=["at once", "any time"])
@pytest.mark.parametrize("noise", [0.0, 0.05])
@pytest.mark.parametrize("ladder", [CONSTANT, FLAT, LINEAR], ids=["constant", "GPU", "CPU"])
def test_beside_a_greedy_client_one_waits_for_the_batch_that_has_begun_and_its_own(ladder, noise, pause_s):
    crowd = Crowd(ladder, noise, pause_s).run(20.0)
    batch_s = ladder[4] if ladder is LINEAR else ladder[8]  # Half the size answers 97 % as many, in half the time.
    early_s = 0.0 if pause_s[0] == pause_s[1] else sharing.early_s(batch_s, 0.0)
    assert sorted(crowd.modest_s)[int(0.99 * len(crowd.modest_s))] < (2 * batch_s + early_s) * (1 + 3 * noise)
    assert crowd.answered > 0.95 * 20 * max(size / taken_s for size, taken_s in ladder.items())


# Any history


class SchedulerMachine(RuleBasedStateMachine):
    """No item lost or sent twice, bounds exact, nothing expired computed, no idle worker beside work it can do."""

    LIMITS = {"a": 6, "b": 20}  # noqa: RUF012
    PRIORITIES = st.integers(-1, 2)

    def __init__(self):
        super().__init__()
        self.scheduler = Scheduler(self.LIMITS)
        self.now = 0.0
        self.reservations = []  # Those with images left.
        self.queued = []
        self.returned = set()  # Items requeued, which may exceed a limit.
        self.flying = {}
        self.ended = set()  # Items answered, dropped, discarded or failed.
        self.workers = {}  # Whether each is retiring.
        self.ladders = {}
        self.depths = {}
        self.ceilings = {}  # (worker, model): size and until when it surely holds.

    def _end(self, items):
        for item in items:
            assert item not in self.ended, "ended twice"
            self.ended.add(item)

    def _dispatch(self):
        batches, dropped = self.scheduler.dispatch(self.now)
        for item in dropped:
            self.queued.remove(item)
        self._end(dropped)
        for batch in batches:
            self._check(batch)
            for item in batch.items:
                self.queued.remove(item)  # ValueError: lost before, or sent twice.
            assert batch.id not in self.flying
            self.flying[batch.id] = batch
        self._work_conserving()

    def _check(self, batch):
        assert self.workers[batch.worker] is False, "sent to one that retires"
        assert batch.size in self.ladders[batch.worker]
        ceiling, until_s = self.ceilings.get((batch.worker, batch.model), (8, NEVER))
        assert self.now >= until_s or batch.size <= ceiling
        assert 1 <= len(batch.items) <= batch.size
        assert not [size for size in self.ladders[batch.worker] if len(batch.items) <= size < batch.size]
        assert len(batch.items) == 1 or not any(item.alone for item in batch.items)
        for item in batch.items:
            assert item.model == batch.model
            assert item.deadline_s > self.now

    def _held(self, model):
        reserved = sum(reservation.left for reservation in self.reservations if reservation.model == model)
        return reserved + sum(item.model == model for item in self.queued)

    @rule(
        model=st.sampled_from(sorted(LIMITS)),
        images=st.integers(1, 8),
        lasts_s=st.sampled_from([0.0, 0.005, 0.05, 0.2, 1.0, 100.0]),
        priority=PRIORITIES,
    )
    def reserve(self, model, images, lasts_s, priority):
        before = self._held(model)
        try:
            self.reservations.append(reserve(self.scheduler, model, images, self.now + lasts_s, priority, self.now))
        except NeverRoomError:
            assert images > self.LIMITS[model]
            return
        except QueueFullError:
            assert images <= self.LIMITS[model] < before + images
            return
        except DeadlineUnreachableError:
            # Only what 40 s of waiting taught can explain that 100 s are not enough.
            assert lasts_s < 100.0 or self.now >= 40.0
            ladders = [self.scheduler._workers[name].latencies[model] for name in self._idle()]
            assert before or not ladders or lasts_s <= min(ladder.least_s for ladder in ladders) * images
        assert before + images <= self.LIMITS[model]

    @precondition(lambda self: self.reservations)
    @rule(data=st.data(), images=st.integers(1, 8), send=st.booleans())
    def enqueue(self, data, images, send):
        reservation = data.draw(st.sampled_from(self.reservations))
        for position in range(min(images, reservation.left)):
            self.queued.append(enqueue(self.scheduler, reservation, self.now, position))
        if not reservation.left:
            self.reservations.remove(reservation)
        if send:
            self._dispatch()

    @precondition(lambda self: self.reservations)
    @rule(data=st.data())
    def release(self, data):
        reservation = data.draw(st.sampled_from(self.reservations))
        self.scheduler.release(reservation)
        self.scheduler.release(reservation)
        self.reservations.remove(reservation)

    @precondition(lambda self: self.queued)
    @rule(data=st.data())
    def discard(self, data):
        item = data.draw(st.sampled_from(self.queued))
        assert self.scheduler.discard(item)
        assert not self.scheduler.discard(item)
        self.queued.remove(item)
        self._end([item])

    @rule(model=st.sampled_from(sorted(LIMITS)))
    def discard_all(self, model):
        gone = self.scheduler.queues[model].take_all()
        assert sorted(map(id, gone)) == sorted(id(item) for item in self.queued if item.model == model)
        self.queued = [item for item in self.queued if item.model != model]
        self._end(gone)

    @precondition(lambda self: len(self.workers) < 3)
    @rule(ladder=st.sampled_from([LINEAR, FLAT, {2: 0.01, 8: 0.03}]), depth=st.integers(1, 2))
    def add_worker(self, ladder, depth):
        name = f"w{len(self.ladders)}"
        self.scheduler.add_worker(name, dict.fromkeys(self.LIMITS, ladder), dict.fromkeys(self.LIMITS, depth))
        self.depths[name] = depth
        self.workers[name], self.ladders[name] = False, ladder
        self._dispatch()

    @precondition(lambda self: self.workers)
    @rule(data=st.data())
    def retire_worker(self, data):
        name = data.draw(st.sampled_from(sorted(self.workers)))
        self.scheduler.retire_worker(name)
        self.workers[name] = True

    @precondition(lambda self: self.workers)
    @rule(data=st.data())
    def lose_worker(self, data):
        name = data.draw(st.sampled_from(sorted(self.workers)))
        del self.workers[name]
        lost = self.scheduler.remove_worker(name)
        sent = [batch for batch in self.flying.values() if batch.worker == name]
        assert lost == LostBatches(tuple(sent[: self.depths[name]]), tuple(sent[self.depths[name] :]))
        for batch in sent:
            del self.flying[batch.id]
            self._again(batch.items, suspects=batch in lost.begun)
        self._dispatch()

    @precondition(lambda self: self.flying)
    @rule(data=st.data())
    def fail_batch(self, data):
        batch = data.draw(st.sampled_from(list(self.flying.values())))
        self.scheduler.finish(batch.worker, batch.id, self.now, learn=False)
        del self.flying[batch.id]
        self._again(batch.items, suspects=True)
        self._dispatch()

    def _again(self, items, suspects):
        for item in items:
            if item.alone and suspects:
                self._end([item])  # It failed a second time.
                continue
            requeue(self.scheduler, item, alone=suspects or item.alone)
            self.queued.append(item)
            self.returned.add(item)

    @precondition(lambda self: self.flying)
    @rule(data=st.data(), took_s=st.sampled_from([0.0, 0.01, 0.1, 3.0]), learn=st.booleans())
    def finish(self, data, took_s, learn):
        self.now += took_s
        name = data.draw(st.sampled_from(sorted({batch.worker for batch in self.flying.values()})))
        batch = next(batch for batch in self.flying.values() if batch.worker == name)
        assert self.scheduler.finish(name, batch.id, self.now, learn=learn) is batch
        del self.flying[batch.id]
        self._end(batch.items)
        self._dispatch()

    @precondition(lambda self: self.workers)
    @rule(data=st.data(), model=st.sampled_from(sorted(LIMITS)), size=st.sampled_from([1, 2, 4]))
    def limit_batches(self, data, model, size):
        name = data.draw(st.sampled_from(sorted(self.workers)))
        self.scheduler.limit_batches(name, model, size, self.now)
        smallest = min(self.ladders[name])
        self.ceilings[name, model] = (max(size, smallest), self.now + 30)

    @rule(seconds=st.sampled_from([0.001, 0.03, 0.3, 3.0, 40.0]))
    def time_passes(self, seconds):
        self.now += seconds
        self._dispatch()

    @invariant()
    def counts_agree(self):
        for model, limit in self.LIMITS.items():
            assert self.scheduler.queues[model].depth == sum(item.model == model for item in self.queued)
            extra = sum(item.model == model for item in self.queued if item in self.returned)
            assert self._held(model) - extra <= limit
            flying = sum(len(batch.items) for batch in self.flying.values() if batch.model == model)
            assert self.scheduler.queues[model].in_flight == flying

    @invariant()
    def what_is_ahead_is_what_waits_and_what_is_reserved(self):
        for model in self.LIMITS:
            held = Counter(item.priority for item in self.queued if item.model == model)
            for reservation in self.reservations:
                if reservation.model == model:
                    held[reservation.priority] += reservation.left
            assert self.scheduler.queues[model].ahead == held
            assert 0 not in self.scheduler.queues[model].ahead.values()

    @invariant()
    def nothing_is_in_two_places(self):
        flying = items_of(self.flying.values())
        items = [id(item) for item in [*self.queued, *flying, *self.ended]]
        assert len(items) == len(set(items))

    @invariant()
    def memory_is_bounded(self):
        for model in self.LIMITS:
            queue = self.scheduler.queues[model]
            assert len(queue.line) == queue.depth

    @invariant()
    def what_runs_alone_is_its_workers_only_batch(self):
        for batch in self.flying.values():
            if batch.items[0].alone:
                assert [other.worker for other in self.flying.values()].count(batch.worker) == 1

    @invariant()
    def at_most_two_batches_a_worker(self):
        assert all(number <= 2 for number in Counter(batch.worker for batch in self.flying.values()).values())

    def teardown(self):
        """Whatever happened, everything that waits ends once a worker is there, and memory is given back."""
        self.scheduler.add_worker("last", dict.fromkeys(self.LIMITS, FLAT))
        self.workers["last"], self.ladders["last"] = False, FLAT
        self._dispatch()
        while self.flying:
            self.now += 0.01
            batch = next(iter(self.flying.values()))
            self.scheduler.finish(batch.worker, batch.id, self.now)
            del self.flying[batch.id]
            self._end(batch.items)
            self._dispatch()
        assert not self.queued, "starved"

    def _work_conserving(self):
        """Check that no worker is idle beside waiting work, unless a busy one is faster and in time."""
        idle = self._idle()
        for model in self.LIMITS:
            waiting = [item for item in self.queued if item.model == model]
            if waiting:
                for name in idle:
                    least_s = self.scheduler._workers[name].latencies[model].least_s
                    first = self.scheduler.queues[model].first()
                    assert first.deadline_s < self.now + least_s
                    assert first.deadline_s > self.now
                    assert len(idle) < sum(not retiring for retiring in self.workers.values())

    def _idle(self):
        busy = {batch.worker for batch in self.flying.values()}
        return [name for name, retiring in self.workers.items() if not retiring and name not in busy]


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=100, stateful_step_count=50, deadline=None, derandomize=True)
