"""The order in which images are decoded, and the bounds on what waits: pure logic."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.decoding.waiting import DecodeQueue, DecodeQueueFullError, PendingImage


def test_a_client_that_sends_much_stands_behind_itself_and_not_before_others():
    queue, order = DecodeQueue(1, 1000), []
    for number, client in enumerate(["many"] * 50 + ["few"] * 2):
        entry = PendingImage(0, 0.0, number)
        entry.client = client
        entry.rank_s = entry.turn_s = queue.turn_s(client, 100 + number * 0.001, 0.01)
        queue.admit()
        queue.push(entry)
    while (entry := queue.pop(lambda _: True)) is not None:
        queue.took(entry.model, 1.0)
        order.append(entry.client)
    assert order.index("few") < 10
    assert order[:20].count("few") == 2
    assert order.count("many") == 50


def test_no_more_than_the_limit_are_held_and_an_eighth_of_them_large():
    queue = DecodeQueue(1, 16)
    entries = [PendingImage(0, 0.0, number) for number in range(16)]
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
            entry = PendingImage(model, value, number)
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
