"""What is known of how long things take, with a clock made of numbers."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.scheduling.queue import Lateness
from app.scheduling.workers import BatchLatencies

LINEAR = {1: 0.010, 2: 0.019, 4: 0.037, 8: 0.072}  # A CPU: twice the images, nearly twice the time.
FLAT = {1: 0.010, 2: 0.010, 4: 0.011, 8: 0.012}  # A GPU: the time hardly grows.

ladders = st.dictionaries(st.integers(1, 64), st.floats(1e-4, 10), min_size=1, max_size=6)


@pytest.mark.parametrize(
    ("seconds", "waiting", "size"),
    [
        (LINEAR, 3, 2),
        ({2: 2.0, 4: 3.0}, 3, 4),
        (LINEAR, 5, 4),
        (LINEAR, 8, 8),
        (FLAT, 3, 4),
        (FLAT, 5, 8),
        (FLAT, 1, 1),
        (FLAT, 50, 8),
    ],
)
def test_padding_is_paid_only_where_it_costs_less_than_a_second_batch(seconds, waiting, size):
    assert BatchLatencies(seconds).best_size(waiting, 0.0) == size


def test_a_ceiling_that_did_not_hold_lasts_longer_the_next_time_within_a_limit():
    ladder = BatchLatencies(FLAT)
    now, waits = 0.0, []
    for _ in range(8):
        ladder.limit(4, now)
        start = now
        while ladder.ceiling(now) == 4:
            now += 1.0
        waits.append(now - start)
    assert waits == [30, 60, 120, 240, 480, 600, 600, 600]


@settings(deadline=None, derandomize=True)
@given(ladders, st.integers(1, 200), st.none() | st.integers(0, 64))
def test_the_best_size_is_under_the_ceiling_and_no_neighbouring_one_answers_more_items_a_second(
    seconds, waiting, limit
):
    ladder = BatchLatencies(seconds)
    if limit is not None:
        ladder.limit(limit, 0.0)
    size, ceiling = ladder.best_size(waiting, 1.0), ladder.ceiling(1.0)
    assert size in seconds
    assert size <= ceiling
    assert ceiling <= max(limit or 0, min(seconds)) or limit is None
    usable = [each for each in seconds if each <= ceiling]
    above = min((each for each in usable if each >= waiting), default=ceiling)
    below = max((each for each in usable if each <= waiting), default=above)
    rate = {each: min(each, waiting) / seconds[each] for each in (above, below)}
    assert size <= above
    assert rate[size] == max(rate.values())


@settings(deadline=None, derandomize=True)
@given(ladders, st.lists(st.tuples(st.integers(0, 5), st.floats(0, 100)), max_size=50))
def test_estimates_stay_within_what_was_measured_and_scale_with_it_and_forgetting_leads_back(seconds, taken):
    ladder = BatchLatencies(seconds)
    for index, took in taken:
        size = ladder.sizes[index % len(ladder.sizes)]
        ladder.learn(size, took, 0.0)
        assert all(ladder.seconds[size] >= 0 for size in ladder.sizes)
        assert ladder.least_s <= max(took, ladder.seconds[size])
        assert ladder.rate == pytest.approx(max(size / max(ladder.seconds[size], 1e-9) for size in ladder.sizes))
    below = {size: ladder.seconds[size] for size in ladder.sizes if ladder.seconds[size] <= seconds[size]}
    for periods in range(60):
        ladder.age(1.0 + periods, 1.0)
    for size in ladder.sizes:
        assert ladder.seconds[size] == pytest.approx(below.get(size, seconds[size]))


@settings(deadline=None, derandomize=True, max_examples=30)
@given(st.lists(st.floats(-10, 10), max_size=20), st.floats(-5, 5))
def test_lateness_converges_to_what_is_always_the_case(before, always):
    lateness = Lateness()
    for sample in before + [always] * 800:
        lateness.learn(sample, 0.0)
    assert lateness.seconds == pytest.approx(max(0.0, always), abs=1e-3)
