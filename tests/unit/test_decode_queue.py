"""The order in which images are decoded, and the bounds on what waits: pure logic."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.decoding.waiting import DecodeQueue, DecodeQueueFullError, PendingImage


def waiting(model, name, rank_s, large=False):
    """Return an image whose body is its name."""
    return PendingImage(model, rank_s, name, large=large)


def filled(entries, models=2):
    queue = DecodeQueue(models, 1000)
    for entry in entries:
        queue.admit()
        queue.push(entry)
    return queue


def drained(queue, *, large=True, cost_s=1.0):
    order = []
    while (entry := queue.pop(lambda _: large)) is not None:
        queue.took(entry.model, cost_s)
        order.append(entry)
    return order


def test_models_share_by_the_seconds_their_images_take():
    queue = filled([waiting(model, model, float(number)) for number in range(40) for model in (0, 1)])
    order = []
    for _ in range(20):
        entry = queue.pop()
        queue.took(entry.model, 3.0 if entry.model == 0 else 1.0)
        order.append(entry.model)
    assert order.count(0) == 5
    assert order.count(1) == 15


def arrived(queue, clients, *, image_s=0.01, apart_s=0.0):
    """Entries of these clients, which came one after the other; the body is which one it was."""
    entries = []
    for number, client in enumerate(clients):
        entry = waiting(0, number, 0.0)
        entry.client, now_s = client, 100 + number * apart_s
        entry.rank_s = entry.turn_s = queue.turn_s(client, now_s, image_s)
        queue.admit()
        queue.push(entry)
        entries.append(entry)
    return entries


def test_a_client_that_sends_much_stands_behind_itself_and_not_before_others():
    queue = DecodeQueue(1, 1000)
    arrived(queue, ["many"] * 50 + ["few"] * 2, apart_s=0.001)
    order = [entry.client for entry in drained(queue)]
    assert order.index("few") < 10
    assert order[:20].count("few") == 2
    assert order.count("many") == 50


def test_a_turn_is_no_later_than_all_that_waits_takes_and_clients_are_forgotten():
    queue = DecodeQueue(1, 10**6)
    arrived(queue, [f"client {number}" for number in range(50)])
    arrived(queue, ["much"] * 50)
    assert queue.turn_s("much", 100.0, 0.01) == pytest.approx(101.0)
    assert queue.turn_s("nothing", 100.0, 0.01) == 100.0
    drained(queue)
    assert len(queue._turns) == 0


def test_what_is_before_an_image_is_what_goes_before_it():
    """Of its own model by their ranks, of others as much as of its own and an image; equal ranks in their order."""
    queue = filled([waiting(0, number, rank) for number, rank in enumerate((1.0, 2.0, 2.0, 3.0))], models=3)
    for model, image_s in enumerate((0.01, 0.1, 1.0)):
        queue.took(model, image_s)
    assert queue.work_before_s(0, 0.5, 1) == 0.0
    assert queue.work_before_s(0, 2.0, 1) == pytest.approx(3 * 0.01)
    assert queue.work_before_s(0, 2.0, 4) == pytest.approx(6 * 0.01)
    assert queue.work_before_s(1, 2.0, 1) == pytest.approx(0.01)
    for number in range(20):
        queue.admit()
        queue.push(waiting(1, number, 2.0))
    assert queue.work_before_s(0, 2.0, 1) == pytest.approx(3 * 0.01 + 3 * 0.01 + 0.1)
    assert queue.work_before_s(1, 2.0, 1) == pytest.approx(20 * 0.1 + 4 * 0.01)
    assert queue.work_before_s(2, 2.0, 1) == pytest.approx(0.01 + 0.1)


def test_a_model_that_was_idle_has_earned_no_credit():
    queue = filled([waiting(0, number, float(number)) for number in range(20)])
    for _ in range(10):
        queue.took(queue.pop().model, 1.0)
    for number in range(10):
        queue.admit()
        queue.push(waiting(1, number, 0.0))
    order = [entry.model for entry in drained(queue)]
    assert order[:10].count(1) in (5, 6)


def test_no_more_than_the_limit_are_held_and_an_eighth_of_them_large():
    queue = DecodeQueue(1, 16)
    entries = [waiting(0, number, 0.0) for number in range(16)]
    for entry in entries:
        queue.admit()
        queue.push(entry)
    with pytest.raises(DecodeQueueFullError, match="16 images"):
        queue.admit()
    queue.enlarge(entries[0])
    queue.enlarge(entries[1])
    with pytest.raises(DecodeQueueFullError, match="2 large"):
        queue.enlarge(entries[2])
    queue.leave(entries[0])
    queue.admit()
    queue.enlarge(entries[2])


@given(
    st.lists(
        st.tuples(st.sampled_from(["push", "pop", "pop small", "discard"]), st.integers(0, 2), st.floats(-5, 5)),
        max_size=60,
    )
)
def test_every_image_comes_out_once_or_was_discarded_and_counts_agree(actions):
    queue: DecodeQueue = DecodeQueue(3, 1000)
    left: dict[int, PendingImage] = {}
    for number, (action, model, value) in enumerate(actions):
        if action == "push":
            queue.admit()
            entry = waiting(model, number, value)
            if number % 3 == 0:
                queue.enlarge(entry)
            queue.push(entry)
            left[number] = entry
        elif action == "discard" and left:
            entry = left.pop(min(left))
            assert queue.discard(entry)
            assert not queue.discard(entry)
            queue.leave(entry)
        elif action.startswith("pop"):
            small = action == "pop small"
            entry = queue.pop(lambda _, small=small: not small)
            fitting = [each for each in left.values() if not (small and each.large)]
            assert (entry is None) == (not fitting)
            if entry is not None:
                assert not (small and entry.large)
                same = [each.rank_s for each in fitting if each.model == entry.model]
                assert entry.rank_s == min(same)
                del left[entry.body]
                queue.took(entry.model, abs(value))
                queue.leave(entry)
        assert queue.waiting == queue.held == len(left)
        assert queue.held_large == sum(entry.large for entry in left.values())
