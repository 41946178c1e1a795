"""The scheduler, with a clock made of numbers."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from app.scheduler import Item, Latency, QueueFullError, Scheduler

LINEAR = {1: 0.010, 2: 0.019, 4: 0.037, 8: 0.072}  # A CPU: twice the images, nearly twice the time.
FLAT = {1: 0.010, 2: 0.010, 4: 0.011, 8: 0.012}  # A GPU: the time hardly grows.


def make(limits=None, latency=LINEAR, workers=("w",), **options):
    scheduler = Scheduler(limits or {"m": 100}, **options)
    for worker in workers:
        scheduler.add_worker(worker, dict.fromkeys(limits or {"m": 100}, latency))
    return scheduler


def put(scheduler, count, model="m", now=0.0, deadline=1e9, priority=0):
    items = [Item(model, None, deadline, priority) for _ in range(count)]
    for item in items:
        scheduler.reserve(model, 1)
        scheduler.enqueue(item, now)
    return items


def dispatch(scheduler, now=0.0):
    return scheduler.dispatch(now)[0]


def test_an_idle_worker_gets_whatever_is_there_at_once():
    scheduler = make()
    put(scheduler, 1)
    assert [len(batch.items) for batch in dispatch(scheduler)] == [1]


def test_while_a_worker_computes_a_partial_batch_keeps_filling():
    scheduler = make()
    put(scheduler, 1)
    [first] = dispatch(scheduler)
    put(scheduler, 7)
    assert dispatch(scheduler) == []
    scheduler.finish("w", first.id, 0.01)
    assert [len(batch.items) for batch in dispatch(scheduler)] == [4]


def test_while_a_worker_computes_exactly_one_full_batch_waits_in_front_of_it():
    scheduler = make()
    put(scheduler, 40)
    assert [len(batch.items) for batch in dispatch(scheduler)] == [8, 8]
    assert scheduler.waiting("m") == 24
    assert scheduler.in_flight("m") == 16


def test_items_keep_their_order():
    scheduler = make()
    items = put(scheduler, 12)
    first, *_ = dispatch(scheduler)
    assert list(first.items) == items[:8]


def test_two_idle_workers_share_what_is_there():
    scheduler = make(workers=("a", "b"))
    put(scheduler, 1)
    [batch] = dispatch(scheduler)
    put(scheduler, 1)
    [other] = dispatch(scheduler)
    assert {batch.worker, other.worker} == {"a", "b"}


@pytest.mark.parametrize(
    ("latency", "waiting", "size"),
    [(LINEAR, 3, 2), (LINEAR, 5, 4), (LINEAR, 8, 8), (FLAT, 3, 4), (FLAT, 5, 8), (FLAT, 1, 1), (FLAT, 50, 8)],
)
def test_padding_is_paid_only_where_it_costs_less_than_a_second_batch(latency, waiting, size):
    assert Latency(latency).best_size(waiting) == size


def test_padding_shows_in_the_batch():
    scheduler = make(latency=FLAT)
    put(scheduler, 5)
    [batch] = dispatch(scheduler)
    assert (len(batch.items), batch.size) == (5, 8)


def test_latency_is_learned():
    latency = Latency({4: 0.1})
    for _ in range(100):
        latency.learn(4, 0.5)
    assert latency.of(4) == pytest.approx(0.5)


def test_the_queue_is_bounded_exactly_and_reservations_count():
    scheduler = make({"m": 5}, workers=())
    put(scheduler, 2)
    scheduler.reserve("m", 3)
    with pytest.raises(QueueFullError, match="5 of 5"):
        scheduler.reserve("m", 1)
    scheduler.release("m")
    scheduler.reserve("m", 1)


def test_a_reservation_is_all_or_nothing():
    scheduler = make({"m": 5}, workers=())
    with pytest.raises(QueueFullError):
        scheduler.reserve("m", 6)
    scheduler.reserve("m", 5)


def test_what_was_not_reserved_cannot_be_released():
    with pytest.raises(ValueError, match="never reserved"):
        make().release("m")


def test_expired_items_are_dropped_and_reported_not_computed():
    scheduler = make()
    late = put(scheduler, 3, deadline=1.0)
    fine = put(scheduler, 2, deadline=9.0)
    batches, expired = scheduler.dispatch(1.0)
    assert expired == late
    assert [item for batch in batches for item in batch.items] == fine


def test_a_discarded_item_frees_its_place_and_is_never_sent():
    scheduler = make({"m": 2}, workers=())
    gone, stays = put(scheduler, 2)
    assert scheduler.discard(gone)
    assert not scheduler.discard(gone)
    scheduler.reserve("m", 1)
    scheduler.add_worker("w", {"m": LINEAR})
    assert [item for batch in dispatch(scheduler) for item in batch.items] == [stays]


def test_many_discards_leave_no_memory_behind():
    scheduler = make(workers=())
    for _ in range(1000):
        [item] = put(scheduler, 1)
        scheduler.discard(item)
    assert len(scheduler._queues["m"].heap) < 50


def test_higher_priority_goes_first():
    scheduler = make(latency={1: 0.01})
    normal, urgent = put(scheduler, 1) + put(scheduler, 1, priority=1)
    sent = [item for batch in dispatch(scheduler) for item in batch.items]
    assert sent == [urgent, normal]


def test_waiting_long_enough_beats_priority():
    scheduler = make(latency={1: 0.01})
    [old] = put(scheduler, 1, now=0.0)
    put(scheduler, 3, now=10.0, priority=2)
    assert dispatch(scheduler, now=10.0)[0].items == (old,)


def test_models_share_a_worker_by_device_time_not_by_requests():
    scheduler = Scheduler({"slow": 10_000, "fast": 10_000})
    scheduler.add_worker("w", {"slow": {1: 0.1}, "fast": {1: 0.01}})
    put(scheduler, 400, "slow")
    put(scheduler, 4000, "fast")
    seconds = {"slow": 0.0, "fast": 0.0}
    waiting = dispatch(scheduler)
    while sum(seconds.values()) < 20:
        batch = waiting.pop(0)
        taken = scheduler._workers["w"].latency[batch.model].of(1)
        seconds[batch.model] += taken
        scheduler.finish("w", batch.id, taken)
        waiting += dispatch(scheduler)
    assert seconds["slow"] == pytest.approx(seconds["fast"], abs=0.3)


def test_idleness_earns_no_credit():
    scheduler = Scheduler({"a": 1000, "b": 1000})
    scheduler.add_worker("w", {"a": {1: 0.01}, "b": {1: 0.01}})
    for _ in range(100):
        put(scheduler, 1, "a")
        [batch] = dispatch(scheduler)
        scheduler.finish("w", batch.id, 0.01)
    put(scheduler, 50, "a")
    put(scheduler, 50, "b")
    order = []
    waiting = dispatch(scheduler)
    for _ in range(20):
        batch = waiting.pop(0)
        order.append(batch.model)
        scheduler.finish("w", batch.id, 0.01)
        waiting += dispatch(scheduler)
    assert 9 <= order.count("a") <= 11


def test_a_partial_batch_of_one_model_is_not_overtaken_for_ever_by_full_ones_of_another():
    scheduler = make({"a": 1000, "b": 1000})
    put(scheduler, 500, "a")
    waiting = dispatch(scheduler)
    [item] = put(scheduler, 1, "b")
    overtaken = 0
    while item not in waiting[0].items:
        overtaken += 1
        scheduler.finish("w", waiting.pop(0).id, 0.07)
        waiting += dispatch(scheduler)
    assert overtaken <= 3


def test_an_idle_worker_waits_for_a_fuller_batch_only_when_told_to():
    scheduler = make(max_wait_s=0.005)
    put(scheduler, 3, now=1.0)
    assert dispatch(scheduler, now=1.001) == []
    assert scheduler.wake_at() == pytest.approx(1.005)
    assert sum(len(batch.items) for batch in dispatch(scheduler, now=1.005)) >= 2


def test_without_a_waiting_time_nobody_needs_waking():
    scheduler = make(workers=())
    put(scheduler, 3)
    assert scheduler.wake_at() is None


def test_a_worker_that_goes_leaves_its_unfinished_batches():
    scheduler = make()
    put(scheduler, 16)
    batches = dispatch(scheduler)
    assert scheduler.remove_worker("w") == tuple(batches)
    assert scheduler.remove_worker("w") == ()
    assert not scheduler.serves("m")


def test_the_drain_time_follows_from_what_waits_and_how_fast_it_goes():
    scheduler = make(latency={1: 0.1})
    put(scheduler, 10)
    assert scheduler.drain_time_s("m") == pytest.approx(1.0)
    assert Scheduler({"m": 1}).drain_time_s("m") == float("inf")


@settings(deadline=None)
@given(
    st.dictionaries(st.integers(1, 64), st.floats(1e-4, 10), min_size=1, max_size=6),
    st.integers(1, 200),
)
def test_the_best_size_is_on_the_ladder_and_wastes_no_rung(seconds, waiting):
    latency = Latency(seconds)
    size = latency.best_size(waiting)
    assert size in seconds
    smaller = [rung for rung in seconds if rung >= waiting]
    assert size <= min(smaller, default=max(seconds))


class SchedulerMachine(RuleBasedStateMachine):
    """Any history: no item lost or sent twice, bounds exact, nothing expired computed, no idle worker beside work."""

    LIMITS = {"a": 6, "b": 20}  # noqa: RUF012

    def __init__(self):
        super().__init__()
        self.scheduler = Scheduler(self.LIMITS)
        self.now = 0.0
        self.reserved = dict.fromkeys(self.LIMITS, 0)
        self.queued = []
        self.flying = {}
        self.workers = set()

    def _dispatch(self):
        batches, expired = self.scheduler.dispatch(self.now)
        for item in expired:
            assert item.deadline_s <= self.now
            self.queued.remove(item)
        for batch in batches:
            assert batch.worker in self.workers
            assert 1 <= len(batch.items) <= batch.size <= 8
            for item in batch.items:
                assert item.model == batch.model
                assert item.deadline_s > self.now
                self.queued.remove(item)  # ValueError: lost before, or sent twice.
            self.flying[batch.id] = batch
        return batches

    def _waiting(self, model):
        return self.reserved[model] + sum(item.model == model for item in self.queued)

    @rule(model=st.sampled_from(sorted(LIMITS)), images=st.integers(1, 8))
    def reserve(self, model, images):
        if self._waiting(model) + images <= self.LIMITS[model]:
            self.scheduler.reserve(model, images)
            self.reserved[model] += images
        else:
            with pytest.raises(QueueFullError):
                self.scheduler.reserve(model, images)

    @rule(model=st.sampled_from(sorted(LIMITS)), lasts_s=st.floats(0, 5), priority=st.integers(-1, 2))
    def enqueue(self, model, lasts_s, priority):
        if self.reserved[model]:
            item = Item(model, None, self.now + lasts_s, priority)
            self.scheduler.enqueue(item, self.now)
            self.reserved[model] -= 1
            self.queued.append(item)
            self._dispatch()

    @precondition(lambda self: any(self.reserved.values()))
    @rule()
    def release(self):
        model = next(model for model, count in self.reserved.items() if count)
        self.scheduler.release(model)
        self.reserved[model] -= 1

    @precondition(lambda self: self.queued)
    @rule(data=st.data())
    def discard(self, data):
        item = data.draw(st.sampled_from(self.queued))
        assert self.scheduler.discard(item)
        self.queued.remove(item)

    @rule(name=st.sampled_from(["w1", "w2"]), latency=st.sampled_from([LINEAR, FLAT]))
    def add_worker(self, name, latency):
        if name not in self.workers:
            self.scheduler.add_worker(name, dict.fromkeys(self.LIMITS, latency))
            self.workers.add(name)
            self._dispatch()

    @precondition(lambda self: self.workers)
    @rule(data=st.data())
    def lose_worker(self, data):
        name = data.draw(st.sampled_from(sorted(self.workers)))
        self.workers.remove(name)
        mine = {id for id, batch in self.flying.items() if batch.worker == name}
        assert {batch.id for batch in self.scheduler.remove_worker(name)} == mine
        for id in mine:
            del self.flying[id]

    @precondition(lambda self: self.flying)
    @rule(data=st.data(), seconds=st.floats(0.001, 1))
    def finish(self, data, seconds):
        id = data.draw(st.sampled_from(sorted(self.flying)))
        batch = self.flying.pop(id)
        assert self.scheduler.finish(batch.worker, id, seconds) is batch
        self._dispatch()

    @rule(seconds=st.floats(0, 3))
    def time_passes(self, seconds):
        self.now += seconds

    @invariant()
    def counts_agree(self):
        for model, limit in self.LIMITS.items():
            assert self.scheduler.waiting(model) == sum(item.model == model for item in self.queued)
            assert self._waiting(model) <= limit
            flying = sum(len(b.items) for b in self.flying.values() if b.model == model)
            assert self.scheduler.in_flight(model) == flying

    @invariant()
    def at_most_two_batches_a_worker(self):
        for name in self.workers:
            assert sum(batch.worker == name for batch in self.flying.values()) <= 2

    @invariant()
    def work_conserving(self):
        idle = self.workers - {batch.worker for batch in self.flying.values()}
        assert not (idle and self.queued), "an idle worker beside waiting work"


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
