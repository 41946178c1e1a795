"""The scheduler, with a clock made of numbers."""

import heapq
import random
import sys
from collections import Counter
from itertools import count

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from app.scheduling import workers as sharing
from app.scheduling.batching import BatchLatencies
from app.scheduling.line import PRIORITY_WORTH_S
from app.scheduling.queue import (
    DeadlineUnreachableError,
    LostBatches,
    NeverRoomError,
    QueueFullError,
    Reservation,
)
from app.scheduling.scheduler import WAY_BACK, Scheduler
from tests.support.queueing import enqueue, requeue, reserve

LINEAR = {1: 0.010, 2: 0.019, 4: 0.037, 8: 0.072}  # A CPU: twice the images, nearly twice the time.
FLAT = {1: 0.010, 2: 0.010, 4: 0.011, 8: 0.012}  # A GPU: the time hardly grows.
NEVER = 1e9


def make(limits=None, ladder=LINEAR, workers=("w",), **options):
    limits = limits or {"m": 100}
    scheduler = Scheduler(limits, **options)
    for worker in workers:
        scheduler.add_worker(worker, dict.fromkeys(limits, ladder))
    return scheduler


def put(scheduler, images, model="m", now=0.0, deadline=NEVER, priority=0):
    """So many requests of one image each."""
    return [enqueue(scheduler, reserve(scheduler, model, 1, deadline, priority, now), None, now) for _ in range(images)]


def put_request(scheduler, images, model="m", now=0.0, deadline=NEVER, priority=0):
    """One request of so many images."""
    reservation = reserve(scheduler, model, images, deadline, priority, now)
    return [enqueue(scheduler, reservation, None, now, position) for position in range(images)]


def dispatch(scheduler, now=0.0):
    return scheduler.dispatch(now)[0]


def items_of(batches):
    return [item for batch in batches for item in batch.items]


def teach(scheduler, seconds, times, now=0.0):
    """Batches of one that take so long, one after the other; returns the time then."""
    for _ in range(times):
        put(scheduler, 1, now=now)
        [batch] = dispatch(scheduler, now)
        now += seconds
        scheduler.finish(batch.worker, batch.id, now)
    return now


# Batches


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
    assert [len(batch.items) for batch in dispatch(scheduler, 0.01)] == [4]


def test_while_a_worker_computes_exactly_one_full_batch_waits_in_front_of_it():
    scheduler = make()
    put(scheduler, 40)
    assert [len(batch.items) for batch in dispatch(scheduler)] == [8, 8]
    assert scheduler.queues["m"].depth == 24
    assert scheduler.queues["m"].in_flight == 16


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


def test_nobody_is_woken_for_what_is_left_to_a_faster_worker():
    scheduler = make(workers=(), max_wait_s=0.005)
    scheduler.add_worker("fast", {"m": {1: 0.1}})
    put(scheduler, 1)
    assert len(dispatch(scheduler, 1.0)) == 1
    put(scheduler, 2, now=1.0, deadline=2.0)
    dispatch(scheduler, 1.0)
    scheduler.add_worker("slow", {"m": {1: 5.0, 8: 5.0}})
    assert dispatch(scheduler, 1.5) == []
    assert scheduler.queues["m"].depth == 1
    assert scheduler.wake_at(1.5) is None, "it spins"


@pytest.mark.parametrize("gone", [0, 1])
def test_the_waiting_time_counts_from_the_oldest_that_waits(gone):
    scheduler = make(workers=("w",), max_wait_s=0.5)
    items = [item for now in (1.0, 1.1, 1.2) for item in put(scheduler, 1, now=now)]
    for item in items[:gone]:
        scheduler.discard(item)
    assert scheduler.wake_at(1.2) == pytest.approx(items[gone].queued_s + 0.5)


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


def test_no_more_images_come_than_were_reserved():
    scheduler = make()
    reservation = reserve(scheduler, "m", 1, NEVER, 0, 0.0)
    enqueue(scheduler, reservation, None, 0.0)
    with pytest.raises(ValueError, match="nothing is left"):
        enqueue(scheduler, reservation, None, 0.0)


def test_checking_takes_no_place():
    scheduler = make({"m": 1})
    for _ in range(3):
        assert scheduler.check(Reservation("m", 1, 0, NEVER), 0.0) == pytest.approx(0.010)
    put(scheduler, 1)
    with pytest.raises(QueueFullError):
        scheduler.check(Reservation("m", 1, 0, NEVER), 0.0)


def test_an_item_that_was_sent_can_no_longer_be_discarded():
    scheduler = make()
    [item] = put(scheduler, 1)
    dispatch(scheduler)
    assert not scheduler.discard(item)


def test_discarding_all_returns_them_in_order_and_frees_their_room():
    scheduler = make({"m": 4}, workers=())
    low, high = put(scheduler, 1), put(scheduler, 1, priority=1)
    assert scheduler.queues["m"].take_all() == high + low
    assert scheduler.queues["m"].take_all() == []
    assert len(put(scheduler, 4)) == 4


# Deadlines


def enough(seconds):
    """Return a deadline for what takes so long, the answer's way back included."""
    return seconds / (1 - WAY_BACK)


def test_a_deadline_no_batch_was_ever_fast_enough_for_is_refused_at_the_door():
    scheduler = make()
    with pytest.raises(DeadlineUnreachableError) as refusal:
        reserve(scheduler, "m", 1, enough(0.0099), 0, 0.0)
    assert refusal.value.expected_s == pytest.approx(0.010)
    reserve(scheduler, "m", 1, enough(0.0101), 0, 0.0)


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


def test_the_longer_wait_counts_the_one_for_the_queue_or_the_one_in_it():
    """What is ahead is computed while an image waits to be decoded."""
    scheduler = make(ladder={1: 0.1})
    assert scheduler.check(Reservation("m", 1, 0, NEVER), 0.0, ready_s=0.7) == pytest.approx(0.8)
    put(scheduler, 4)
    dispatch(scheduler)
    assert scheduler.check(Reservation("m", 1, 0, NEVER), 0.0, ready_s=0.2) == pytest.approx(0.5)
    assert scheduler.check(Reservation("m", 1, 0, NEVER), 0.0, ready_s=0.7) == pytest.approx(0.8)
    with pytest.raises(DeadlineUnreachableError):
        scheduler.check(Reservation("m", 1, 0, enough(0.79)), 0.0, ready_s=0.7)


def test_an_answer_whose_wait_was_not_known_teaches_no_lateness():
    scheduler = make(ladder={1: 0.1})
    assert scheduler.check(Reservation("m", 1, 0, NEVER), 0.0, ready_s=None) is None
    reservation = Reservation("m", 2, 0, NEVER)
    scheduler.reserve(reservation, 0.0, ready_s=lambda _: None)
    assert reservation.expected_s is None
    enqueue(scheduler, reservation, None, 5.0)
    [batch] = dispatch(scheduler, now=5.0)
    scheduler.finish("w", batch.id, 5.1)
    assert scheduler.queues["m"].lateness_of(0, "").seconds == 0.0


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


def test_a_reservation_counts_against_a_deadline_until_released():
    scheduler = make(ladder={1: 0.1})
    reservation = reserve(scheduler, "m", 5, NEVER, 0, 0.0)
    with pytest.raises(DeadlineUnreachableError):
        scheduler.check(Reservation("m", 1, 0, 0.55), 0.0)
    scheduler.release(reservation)
    scheduler.check(Reservation("m", 1, 0, 0.55), 0.0)


def test_only_images_of_at_least_its_priority_are_in_front_of_one():
    scheduler = make(ladder={1: 0.1})
    put(scheduler, 9)
    dispatch(scheduler)
    with pytest.raises(DeadlineUnreachableError):
        scheduler.check(Reservation("m", 1, 0, 0.5), 0.0)
    scheduler.check(Reservation("m", 1, 1, 0.5), 0.0)


def test_an_image_rides_in_whole_batches():
    scheduler = make(ladder={8: 0.08})
    put(scheduler, 24)
    dispatch(scheduler)  # Two in flight, one waits.
    assert scheduler.check(Reservation("m", 1, 0, NEVER), 0.0) == pytest.approx(4 * 0.08)
    put(scheduler, 7)
    assert scheduler.check(Reservation("m", 1, 0, NEVER), 0.0) == pytest.approx(4 * 0.08)


def test_a_long_queue_is_reckoned_with_exactly():
    scheduler = make({"m": 10_000}, ladder={8: 0.08}, workers=("a", "b"))
    assert scheduler.check(Reservation("m", 800, 0, NEVER), 0.0) == pytest.approx(4.0)
    assert scheduler.check(Reservation("m", 801, 0, NEVER), 0.0) == pytest.approx(4.08)


def test_another_model_with_work_halves_what_can_be_promised():
    scheduler = make({"a": 100, "b": 100}, ladder={1: 0.1})
    alone_s = scheduler.check(Reservation("a", 10, 0, NEVER), 0.0)
    put(scheduler, 20, "b")
    dispatch(scheduler)
    assert scheduler.check(Reservation("a", 10, 0, NEVER), 0.0) > 1.8 * alone_s


def test_what_a_slower_worker_taught_is_refused_at_the_door():
    scheduler = make(ladder={1: 0.01})
    now = teach(scheduler, 0.2, 100)
    put(scheduler, 1, now=now)
    dispatch(scheduler, now)
    with pytest.raises(DeadlineUnreachableError):
        scheduler.check(Reservation("m", 1, 0, now + 0.3), now)
    scheduler.check(Reservation("m", 1, 0, now + 9), now)


def test_the_time_of_a_failed_batch_teaches_nothing():
    scheduler = make(ladder={1: 0.01})
    put(scheduler, 1)
    [batch] = dispatch(scheduler)
    scheduler.finish("w", batch.id, 5.0, learn=False)
    assert scheduler._workers["w"].latencies["m"].seconds[1] == 0.01
    assert scheduler.queues["m"].lateness_of(0, "").seconds == 0.0


def test_the_time_a_batch_waited_for_the_one_before_is_not_its_own():
    scheduler = make(ladder={1: 0.1})
    put(scheduler, 2)
    first, second = dispatch(scheduler)
    scheduler.finish("w", first.id, 0.1)
    scheduler.finish("w", second.id, 0.2)
    assert scheduler._workers["w"].latencies["m"].seconds[1] == pytest.approx(0.1)


def test_answers_later_than_the_queue_explains_make_admission_more_careful():
    scheduler = make(ladder={1: 0.01})
    now = 0.0
    for _ in range(200):  # The image takes 50 ms to be there; the batch itself is as fast as expected.
        reservation = reserve(scheduler, "m", 1, NEVER, 0, now)
        now += 0.05
        enqueue(scheduler, reservation, None, now)
        [batch] = dispatch(scheduler, now)
        now += 0.01
        scheduler.finish("w", batch.id, now)
    put(scheduler, 1, now=now)
    dispatch(scheduler, now)
    with pytest.raises(DeadlineUnreachableError) as refusal:
        scheduler.check(Reservation("m", 1, 0, now + 0.06), now)
    assert refusal.value.expected_s == pytest.approx(0.07, abs=0.005)
    assert scheduler.check(Reservation("m", 1, 0, now + 0.08), now) == pytest.approx(0.02, abs=0.001)
    # Where images wait to be decoded, those of a higher priority overtake, and are not refused for the others' sake.
    urgent = reserve(scheduler, "m", 1, NEVER, 1, now)
    assert scheduler.check(Reservation("m", 1, 1, now + 0.06), now) == pytest.approx(0.03, abs=0.001)
    for _ in range(200):
        enqueue(scheduler, urgent, None, now + 0.1)
        now += 0.11
        for batch in (*dispatch(scheduler, now - 0.01), *dispatch(scheduler, now)):
            scheduler.finish("w", batch.id, now)
        urgent = reserve(scheduler, "m", 1, NEVER, 1, now)
    with pytest.raises(DeadlineUnreachableError):
        scheduler.check(Reservation("m", 1, 1, now + 0.06), now)


def test_what_waited_for_another_worker_teaches_no_lateness():
    scheduler = make(ladder={1: 0.01})
    running, behind, waiting = put(scheduler, 3)
    assert items_of(dispatch(scheduler)) == [running, behind]
    scheduler.remove_worker("w")
    requeue(scheduler, behind, alone=False)
    put(scheduler, 1, now=0.1)
    scheduler.add_worker("v", {"m": {1: 0.01}})
    now, sent = 5.0, dispatch(scheduler, 5.0)
    for batch in sent:
        now += 0.01
        scheduler.finish("v", batch.id, now)
        sent += dispatch(scheduler, now)
    assert len(items_of(sent)) == 3
    assert waiting in items_of(sent)
    assert scheduler.queues["m"].lateness_of(0, "").seconds == 0.0


def test_the_later_images_of_a_request_teach_no_lateness():
    scheduler = make({"m": 1000}, ladder={1: 0.01})
    put_request(scheduler, 64)
    now, waiting = 0.0, dispatch(scheduler)
    while waiting:
        now += 0.01
        scheduler.finish("w", waiting.pop(0).id, now)
        waiting += dispatch(scheduler, now)
    assert scheduler.queues["m"].lateness_of(0, "").seconds < 1e-6


def test_a_hopeless_item_is_dropped_when_others_can_use_its_place():
    scheduler = make(ladder={1: 0.1}, workers=())
    hopeless, fine = put(scheduler, 1, deadline=0.09) + put(scheduler, 1, deadline=1.0)
    scheduler.add_worker("w", {"m": {1: 0.1}})
    batches, dropped = scheduler.dispatch(0.0)
    assert (items_of(batches), dropped) == ([fine], [hopeless])


def test_an_item_only_expected_to_be_late_is_tried_when_nobody_else_can_use_its_place():
    scheduler = make(ladder={1: 0.1}, workers=())
    [hopeless] = put(scheduler, 1, deadline=0.09)
    scheduler.add_worker("w", {"m": {1: 0.1}})
    batches, dropped = scheduler.dispatch(0.0)
    assert (items_of(batches), dropped) == ([hopeless], [])


def test_what_is_hopeless_with_one_worker_is_kept_for_another_that_makes_it():
    scheduler = make(workers=())
    scheduler.add_worker("fast", {"m": {1: 0.1}})
    put(scheduler, 2, deadline=1.0)
    dispatch(scheduler)
    waiting = put(scheduler, 3, deadline=1.0)
    scheduler.add_worker("slow", {"m": {1: 5.0}})
    assert scheduler.dispatch(0.0) == ([], [])
    scheduler.finish("fast", next(iter(scheduler._workers["fast"].batches)), 0.1)
    assert [batch.worker for batch in dispatch(scheduler, 0.1)] == ["fast"]
    assert scheduler.queues["m"].depth == len(waiting) - 1


def test_a_slow_worker_helps_with_what_it_can_answer_in_time():
    scheduler = make(workers=())
    scheduler.add_worker("fast", {"m": {1: 0.1}})
    scheduler.add_worker("slow", {"m": {1: 5.0}})
    put(scheduler, 3, deadline=9.0)
    assert [batch.worker for batch in dispatch(scheduler)] == ["fast", "fast", "slow"]


def test_an_estimate_far_too_high_does_not_refuse_for_ever():
    scheduler = make(ladder={1: 0.01})
    now = teach(scheduler, 10.0, 100)
    assert scheduler._workers["w"].latencies["m"].seconds[1] > 9
    answered = 0
    for _ in range(100):
        [item] = put(scheduler, 1, now=now, deadline=now + 0.25)  # Raises if the door stays shut.
        [batch], dropped = scheduler.dispatch(now)
        assert batch.items == (item,)
        assert not dropped
        now += 0.01
        scheduler.finish("w", batch.id, now)
        answered += 1
    assert answered == 100
    assert scheduler._workers["w"].latencies["m"].seconds[1] == pytest.approx(0.01, rel=0.01)
    put(scheduler, 1, now=now)
    dispatch(scheduler, now)
    for _ in range(400):  # The margin heals as well, now that answers come as expected.
        scheduler.queues["m"].lateness_of(0, "").learn(0.0, 0.0)
    scheduler.check(Reservation("m", 1, 0, now + 0.25), now)


def test_without_a_worker_items_wait_for_the_one_on_its_way():
    scheduler = make(workers=())
    [item] = put(scheduler, 1, deadline=0.5)
    with pytest.raises(DeadlineUnreachableError):
        reserve(scheduler, "m", 1, 0.5, 0, 0.6)
    scheduler.add_worker("w", {"m": LINEAR})
    assert items_of(dispatch(scheduler, 0.4)) == [item]


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


def test_the_images_of_a_large_request_leave_room_for_those_that_come_after():
    scheduler = make({"m": 1000}, ladder={1: 0.01})
    large = put_request(scheduler, 64)
    [single] = put(scheduler, 1, now=0.1)
    order = sorted([*large, single], key=lambda item: item.rank_s)
    assert 1 <= order.index(single) <= 4, "at a quarter of 100/s three images of the request come in 0.1 s"


def test_a_large_request_alone_keeps_the_device_full_and_in_order():
    scheduler = make({"m": 1000})
    large = put_request(scheduler, 64)
    batches = dispatch(scheduler)
    assert [batch.size for batch in batches] == [8, 8]
    assert items_of(batches) == large[:16]


def run_turns(scheduler, seconds, now=0.0):
    """Device seconds that each model got of about `seconds`, with everything always waiting."""
    got, waiting = Counter(), dispatch(scheduler, now)
    while sum(got.values()) < seconds:
        batch = waiting.pop(0)
        taken = scheduler._workers["w"].latencies[batch.model].seconds[batch.size]
        now += taken
        got[batch.model] += taken
        scheduler.finish("w", batch.id, now)
        waiting += dispatch(scheduler, now)
    return got


def test_models_share_a_worker_by_device_time_not_by_requests():
    scheduler = Scheduler({"slow": 10_000, "fast": 10_000})
    scheduler.add_worker("w", {"slow": {1: 0.1}, "fast": {1: 0.01}})
    put(scheduler, 400, "slow")
    put(scheduler, 1100, "fast")
    got = run_turns(scheduler, 20)
    assert got["slow"] == pytest.approx(got["fast"], abs=0.3)


def test_idleness_earns_no_credit():
    scheduler = make({"a": 1000, "b": 1000}, ladder={1: 0.01})
    now = 0.0
    for _ in range(100):
        put(scheduler, 1, "a", now=now)
        [batch] = dispatch(scheduler, now)
        now += 0.01
        scheduler.finish("w", batch.id, now)
    put(scheduler, 50, "a", now=now)
    put(scheduler, 50, "b", now=now)
    got = run_turns(scheduler, 0.2, now)
    assert got["a"] == pytest.approx(0.1, abs=0.011)


def test_a_partial_batch_of_one_model_is_not_overtaken_for_ever_by_full_ones_of_another():
    scheduler = make({"a": 1000, "b": 1000})
    put(scheduler, 500, "a")
    waiting = dispatch(scheduler)
    [item] = put(scheduler, 1, "b")
    now, overtaken = 0.0, 0
    while item not in waiting[0].items:
        overtaken += 1
        now += 0.072
        scheduler.finish("w", waiting.pop(0).id, now)
        waiting += dispatch(scheduler, now)
    assert overtaken <= 3


# Workers


def test_the_worker_that_would_be_done_first_gets_the_next_items():
    scheduler = make(workers=())
    scheduler.add_worker("cpu", {"m": {1: 1.0}})
    scheduler.add_worker("gpu", {"m": {1: 0.1}})
    put(scheduler, 1)
    assert [batch.worker for batch in dispatch(scheduler)] == ["gpu"]
    put(scheduler, 1)
    assert [batch.worker for batch in dispatch(scheduler)] == ["gpu"], "0.2 s behind the first beat 1 s at once"
    put(scheduler, 1)
    assert [batch.worker for batch in dispatch(scheduler)] == ["cpu"], "but no worker idles beside waiting work"


def test_each_model_goes_only_to_workers_that_serve_it():
    scheduler = Scheduler({"a": 10, "b": 10})
    scheduler.add_worker("only a", {"a": {1: 0.1}})
    put(scheduler, 1, "b")
    assert dispatch(scheduler) == []
    assert scheduler.serves("a")
    assert not scheduler.serves("b")
    scheduler.add_worker("only b", {"b": {1: 0.1}})
    assert [batch.worker for batch in dispatch(scheduler)] == ["only b"]


def test_behind_a_batch_of_depth_one_nothing_has_begun():
    scheduler = make({"a": 8, "b": 8}, workers=())
    scheduler.add_worker("w", {"a": LINEAR, "b": LINEAR}, {"a": 1, "b": 2})
    put(scheduler, 8, "a")
    put(scheduler, 8, "b")
    first, second = dispatch(scheduler)
    assert first.model != second.model
    assert scheduler.remove_worker("w") == LostBatches((first,), (second,))


def test_what_must_run_alone_is_not_overtaken_for_ever_by_another_model():
    scheduler = make({"a": 1000, "b": 1000})
    put(scheduler, 500, "a")
    waiting = dispatch(scheduler)
    [item] = put(scheduler, 1, "b")
    scheduler.discard(item)
    requeue(scheduler, item, alone=True)
    now, overtaken = 0.0, 0
    while item not in waiting[0].items:
        overtaken += 1
        now += 0.072
        scheduler.finish("w", waiting.pop(0).id, now)
        waiting += dispatch(scheduler, now)
    assert overtaken <= 3


def test_lost_items_come_back_into_a_full_queue_and_before_later_ones():
    scheduler = make({"m": 1})
    [lost] = put(scheduler, 1)
    [batch] = dispatch(scheduler)
    [later] = put(scheduler, 1, now=1.0)
    scheduler.remove_worker("w")
    requeue(scheduler, batch.items[0], alone=False)
    assert scheduler.queues["m"].depth == 2
    with pytest.raises(QueueFullError):
        put(scheduler, 1, now=1.0)
    scheduler.add_worker("v", {"m": LINEAR})
    assert items_of(dispatch(scheduler, 1.0)) == [lost, later]


def test_an_answer_of_a_batch_that_nobody_knows_is_an_error():
    scheduler = make()
    put(scheduler, 1)
    [batch] = dispatch(scheduler)
    scheduler.finish("w", batch.id, 0.01)
    with pytest.raises(KeyError):
        scheduler.finish("w", batch.id, 0.01)
    with pytest.raises(KeyError):
        scheduler.finish("gone", batch.id, 0.01)


# Cost


def calls_an_image(workers, images=400):
    """Return the calls of Python functions for each image of a busy service, in batches of two."""
    scheduler = make({"m": 1000}, {1: 0.001, 2: 0.0011, 8: 0.0015}, [f"w{index}" for index in range(workers)])
    flying, calls, now = [], 0, 0.0

    def count_call(frame, event, _):
        nonlocal calls
        calls += event == "call"

    put(scheduler, 4 * workers)
    flying += dispatch(scheduler)
    sys.setprofile(count_call)
    try:
        for _ in range(images // 2):
            for _ in range(2):
                put(scheduler, 1, now=now)
                flying += dispatch(scheduler, now)
            now += 0.001 / workers
            batch = flying.pop(0)
            scheduler.finish(batch.worker, batch.id, now)
            flying += dispatch(scheduler, now)
    finally:
        sys.setprofile(None)
    return calls / images


def test_eight_workers_cost_hardly_more_an_image_than_one():
    one, eight = calls_an_image(1), calls_an_image(8)
    assert eight < 2 * one


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
        enqueue(self.scheduler, reserve(self.scheduler, "m", 1, NEVER, 0, now, client=client), None, now)

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


def fastest(ladder):
    """Images a second, at most."""
    return max(size / taken_s for size, taken_s in ladder.items())


@pytest.mark.parametrize("pause_s", [(0.001, 0.001), (0.0, 0.1)], ids=["at once", "any time"])
@pytest.mark.parametrize("noise", [0.0, 0.05])
@pytest.mark.parametrize("ladder", [CONSTANT, FLAT, LINEAR], ids=["constant", "GPU", "CPU"])
def test_beside_a_greedy_client_one_waits_for_the_batch_that_has_begun_and_its_own(ladder, noise, pause_s):
    crowd = Crowd(ladder, noise, pause_s).run(20.0)
    batch_s = ladder[4] if ladder is LINEAR else ladder[8]  # Half the size answers 97 % as many, in half the time.
    early_s = 0.0 if pause_s[0] == pause_s[1] else sharing.early_s(batch_s, 0.0)
    assert sorted(crowd.modest_s)[int(0.99 * len(crowd.modest_s))] < (2 * batch_s + early_s) * (1 + 3 * noise)
    assert crowd.answered > 0.95 * 20 * fastest(ladder)


@pytest.mark.parametrize(("rate_kept", "size"), [(1.0, 8), (0.97, 4), (0.94, 2), (0.89, 1)])
def test_a_batch_size_is_as_short_as_the_rate_to_be_kept_allows(rate_kept, size):
    assert BatchLatencies(LINEAR).short_size(rate_kept, 0.0) == size


def test_batches_are_as_short_as_the_throughput_to_be_kept_allows_while_several_clients_ask():
    scheduler = make(ladder=LINEAR)
    for client in "abababababababab":
        enqueue(scheduler, reserve(scheduler, "m", 1, NEVER, 0, 0.0, client=client), None, 0.0)
    [first] = dispatch(scheduler)
    assert len(first.items) == 4
    alone = make(ladder=LINEAR)
    put(alone, 16)
    assert [len(batch.items) for batch in dispatch(alone)] == [8, 8]


def test_one_client_alone_has_its_next_batch_sent_at_once():
    scheduler = make(ladder=CONSTANT)
    for client, now in (("a", 0.0), ("a", 0.1), ("b", 2.0)):
        for _ in range(16):
            enqueue(scheduler, reserve(scheduler, "m", 1, NEVER, 0, now, client=client), None, now)
        batches = dispatch(scheduler, now)
        assert [len(batch.items) for batch in batches] == [8, 8]
        for batch in batches:
            scheduler.finish("w", batch.id, now + 0.02)


def test_the_next_batch_is_sent_late_while_two_clients_ask_and_in_time():
    scheduler = make(ladder=CONSTANT)
    for client in "abababababababab":
        enqueue(scheduler, reserve(scheduler, "m", 1, NEVER, 0, 0.0, client=client), None, 0.0)
    [first] = dispatch(scheduler)
    due_s = scheduler.wake_at(0.0)
    assert due_s == pytest.approx(0.02 - sharing.early_s(0.02, 0.0))
    assert dispatch(scheduler, due_s - 0.001) == []
    late = enqueue(scheduler, reserve(scheduler, "m", 1, NEVER, 5, 0.005, client="c"), None, 0.005)
    [second] = dispatch(scheduler, due_s)
    assert second.items[0] is late
    scheduler.finish("w", first.id, 0.02, prepare_s=0.015)
    assert scheduler.wake_at(0.02) is None, "nothing more is to be sent"
    for client in "abababab":
        enqueue(scheduler, reserve(scheduler, "m", 1, NEVER, 0, 0.021, client=client), None, 0.021)
    due_s = 0.04 - sharing.early_s(0.02, 0.2 * 0.015)
    assert scheduler.wake_at(0.021) == pytest.approx(due_s), "the worker needs longer to begin it"


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
            self.queued.append(enqueue(self.scheduler, reservation, object(), self.now, position))
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


# A short deadline beside a large request


def large_and_small(small_client, deadline_s, *, images=40):
    """Ask for a large request's images; as the first batch ends, ask for one more image by then. Return when it is
    answered.
    """
    scheduler = make()
    large = reserve(scheduler, "m", images, NEVER, 0, 0.0, client="large")
    for position in range(images):
        enqueue(scheduler, large, None, 0.0, position)
    now, small = 0.0, None
    running = dispatch(scheduler, now)
    while running:
        batch = running.pop(0)
        now = max(now, batch.dispatched_s) + LINEAR[batch.size]
        scheduler.finish(batch.worker, batch.id, now)
        if small is not None and small in batch.items:
            return now
        if small is None:
            small = enqueue(
                scheduler, reserve(scheduler, "m", 1, now + deadline_s, 0, now, client=small_client), None, now
            )
        running += dispatch(scheduler, now)
    raise AssertionError("it was never answered")


def test_a_short_deadline_is_admitted_beside_a_large_request_whose_images_go_after_it():
    # 24 images wait: 0.28 s. Ranks of the large request's images are far apart, and another client goes before most.
    assert large_and_small("small", 0.2) <= LINEAR[8] + 0.2


def test_a_client_waits_behind_what_it_asked_before():
    scheduler = make()
    for _ in range(40):
        enqueue(scheduler, reserve(scheduler, "m", 1, NEVER, 0, 0.0, client="greedy"), None, 0.0)
    with pytest.raises(DeadlineUnreachableError):
        reserve(scheduler, "m", 1, 0.2, 0, 0.0, client="greedy")
    reserve(scheduler, "m", 1, 0.2, 0, 0.0, client="modest")


def test_images_of_higher_priority_do_not_make_room_for_others():
    scheduler = make()
    put(scheduler, 1)
    put(scheduler, 64, priority=1)
    with pytest.raises(DeadlineUnreachableError):
        reserve(scheduler, "m", 1, 0.2, 0, 0.0, client="small")


def test_two_results_that_are_read_at_once_do_not_make_a_batch_of_no_time():
    latencies = BatchLatencies({1: 0.1})
    latencies.learn(1, 0.2, 0.0)
    latencies.learn(1, 0.0, 0.0)
    assert latencies.least_s > 0.02
    for _ in range(20):
        latencies.learn(1, 0.01, 0.0)
    assert latencies.least_s == 0.01
