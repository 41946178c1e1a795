"""The order in which images are decoded, and the bounds on what waits: pure logic."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.decoding.waiting import DecodeFailedError, DecodeQueue, DecodeQueueFullError, ImageLimits, PendingImage


def queue_of(models, limit, decoders=2):
    return DecodeQueue(models, decoders, ImageLimits(limit, max_pixels=1000, large_pixels=100))


def test_a_client_that_sends_much_stands_behind_itself_and_not_before_others():
    queue, order = queue_of(1, 1000, decoders=100), []
    queue.took(PendingImage(0, 0.0, b""), 1.0)
    for number, client in enumerate(["many"] * 50 + ["few"] * 2):
        now_s = 100 + number * 0.001
        queue.add(PendingImage(0, now_s, number), client, now_s)
    while (entry := queue.pop()) is not None:
        order.append(entry.client)
    assert order.index("few") < 10
    assert order[:20].count("few") == 2
    assert order.count("many") == 50


def test_no_more_than_the_limit_are_held_and_an_eighth_of_them_large():
    queue = queue_of(1, 16)
    entries = [PendingImage(0, 0.0, number, pixels=100 * (number < 2)) for number in range(16)]
    for entry in entries:
        queue.add(entry, "", 0.0)
    with pytest.raises(DecodeQueueFullError, match="16 images"):
        queue.add(PendingImage(0, 0.0, 16), "", 0.0)
    found = entries[2]
    assert queue.discard(found)
    with pytest.raises(DecodeQueueFullError, match="2 large"):
        queue.enlarge(found)
    assert queue.discard(entries[0])
    queue.end(entries[0], DecodeFailedError())
    queue.enlarge(found)
    queue.push(found)
    queue.add(PendingImage(0, 0.0, 16), "", 0.0)


@given(
    st.lists(
        st.tuples(st.sampled_from(["push", "pop", "pop small", "discard"]), st.integers(0, 2), st.floats(-5, 5)),
        max_size=60,
    )
)
def test_every_image_comes_out_once_or_was_discarded_and_counts_agree(actions):
    queue, ended = queue_of(3, 1000), DecodeFailedError()
    left: dict[int, PendingImage] = {}
    for number, (action, model, value) in enumerate(actions):
        if action == "push":
            left[number] = entry = PendingImage(model, value, b"%d" % number, pixels=100 * (number % 3 == 0))
            queue.add(entry, "", 0.0)
        elif action == "discard" and left:
            entry = left.pop(min(left))
            assert queue.discard(entry)
            assert not queue.discard(entry)
            queue.end(entry, ended)
        elif action.startswith("pop"):
            # With two decoders no large image fits while another one is decoded.
            decoded = PendingImage(model, 0.0, b"", pixels=100)
            if small := action == "pop small":
                queue.add(decoded, "", 0.0)
                assert queue.discard(decoded)
            entry = queue.pop()
            fitting = [each for each in left.values() if not (small and each.large)]
            assert (entry is None) == (not fitting)
            if entry is not None:
                assert not (small and entry.large)
                same = [each.rank_s for each in fitting if each.model == entry.model]
                assert entry.rank_s == min(same)
                del left[int(entry.body)]
                queue.took(entry, abs(value))
                queue.end(entry, ended)
            if small:
                queue.end(decoded, ended)
        assert queue.waiting == queue.held == len(left)
