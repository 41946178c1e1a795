"""What is known of how long things take, with a clock made of numbers."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.scheduling.batching import BatchLatencies, Lateness

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


def test_latency_is_learned_upwards_and_downwards():
    ladder = BatchLatencies({4: 0.1})
    for seconds in (0.5, 0.02):
        for _ in range(100):
            ladder.learn(4, seconds, 0.0)
        assert ladder.seconds[4] == pytest.approx(seconds, rel=1e-3)
        assert ladder.rate == pytest.approx(4 / seconds, rel=1e-3)


def test_one_stall_does_not_make_a_size_unusable():
    ladder = BatchLatencies(FLAT)
    ladder.learn(8, 30.0, 0.0)
    assert ladder.seconds[8] < 2 * FLAT[8]
    assert ladder.best_size(8, 0.0) == 8


def test_a_size_that_was_slow_for_a_time_is_tried_again():
    ladder = BatchLatencies(FLAT)
    for _ in range(50):
        ladder.learn(8, 1.0, 0.0)
    assert ladder.best_size(7, 0.0) == 4, "the test needs a size that is avoided"
    tried = 0
    for _ in range(2000):
        size = ladder.best_size(7, 0.0)
        tried += size == 8
        ladder.learn(size, FLAT[size], 0.0)
    assert tried > 1000
    assert ladder.best_size(7, 0.0) == 8


def test_a_size_that_stays_slow_is_tried_only_rarely():
    truth = {**FLAT, 8: 0.030}
    ladder = BatchLatencies(FLAT)
    sizes = []
    for _ in range(2000):
        sizes.append(ladder.best_size(7, 0.0))
        ladder.learn(sizes[-1], truth[sizes[-1]], 0.0)
    assert 0 < sizes[1000:].count(8) < 300


def test_the_ceiling_comes_back_one_size_at_a_time():
    ladder = BatchLatencies(FLAT)
    ladder.limit(1, 0.0)
    assert [ladder.ceiling(now) for now in (29.9, 30.0, 59.9, 60.0, 89.9, 90.0, 1e6)] == [1, 2, 2, 4, 4, 8, 8]
    assert ladder.rate == pytest.approx(8 / 0.012)


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
def test_the_best_size_is_among_the_sizes_and_under_the_ceiling_and_wastes_no_size(seconds, waiting, limit):
    ladder = BatchLatencies(seconds)
    if limit is not None:
        ladder.limit(limit, 0.0)
    size, ceiling = ladder.best_size(waiting, 1.0), ladder.ceiling(1.0)
    assert size in seconds
    assert size <= ceiling
    assert ceiling <= max(limit or 0, min(seconds)) or limit is None
    usable = [each for each in seconds if each <= ceiling]
    assert size <= min((each for each in usable if each >= waiting), default=ceiling)


@settings(deadline=None, derandomize=True)
@given(ladders, st.integers(1, 200))
def test_no_neighbouring_size_answers_more_items_a_second(seconds, waiting):
    size = BatchLatencies(seconds).best_size(waiting, 0.0)
    above = min((each for each in seconds if each >= waiting), default=max(seconds))
    below = max((each for each in seconds if each <= waiting), default=above)
    rate = {each: min(each, waiting) / seconds[each] for each in (above, below)}
    assert rate[size] == max(rate.values())


@settings(deadline=None, derandomize=True)
@given(ladders, st.lists(st.tuples(st.integers(0, 5), st.floats(0, 100)), max_size=50))
def test_estimates_stay_within_what_was_measured_and_scale_with_it(seconds, taken):
    ladder = BatchLatencies(seconds)
    for index, took in taken:
        size = ladder.sizes[index % len(ladder.sizes)]
        ladder.learn(size, took, 0.0)
        assert all(ladder.seconds[size] >= 0 for size in ladder.sizes)
        assert ladder.least_s <= max(took, ladder.seconds[size])
        assert ladder.rate == pytest.approx(max(size / max(ladder.seconds[size], 1e-9) for size in ladder.sizes))


@settings(deadline=None, derandomize=True, max_examples=30)
@given(st.lists(st.floats(-10, 10), max_size=20), st.floats(-5, 5))
def test_lateness_converges_to_what_is_always_the_case(before, always):
    lateness = Lateness()
    for sample in before + [always] * 800:
        lateness.learn(sample, 0.0)
    assert lateness.seconds == pytest.approx(max(0.0, always), abs=1e-3)


def test_nearly_all_answers_come_within_the_lateness_learned():
    rnd, lateness, within = random.Random(1), Lateness(), 0
    for index in range(2000):
        sample = rnd.gauss(0.02, 0.01)
        within += index >= 500 and sample <= lateness.seconds
        lateness.learn(sample, 0.0)
    assert within / 1500 >= 0.985
    assert lateness.seconds < 0.02 + 6 * 0.01, "it must not refuse more than noise demands"


def late_by(seconds):
    lateness = Lateness()
    for _ in range(200):
        lateness.learn(seconds, 0.0)
    assert lateness.seconds == pytest.approx(seconds, rel=0.05)
    return lateness


def test_one_answer_after_a_pause_hardly_moves_the_lateness():
    lateness = late_by(0.02)
    lateness.learn(8.0, 0.0)
    assert lateness.seconds < 0.06


def test_what_comes_early_while_nothing_else_is_under_way_shows_that_a_backlog_is_over():
    lateness, other = late_by(4.0), late_by(4.0)
    for _ in range(6):
        lateness.learn(0.01, 0.0, alone=True)
        other.learn(0.01, 0.0)
    assert lateness.seconds < 0.5
    assert other.seconds > 2.0


def test_what_is_usual_while_nothing_else_is_under_way_is_not_forgotten():
    lateness = late_by(0.3)
    for _ in range(100):
        lateness.learn(0.3, 0.0, alone=True)
    assert lateness.seconds == pytest.approx(0.3, rel=0.05)


@settings(deadline=None, derandomize=True)
@given(ladders, st.lists(st.tuples(st.integers(0, 5), st.floats(0, 100)), max_size=50))
def test_forgetting_leads_from_above_to_what_was_measured(seconds, taken):
    ladder = BatchLatencies(seconds)
    for index, took in taken:
        size = ladder.sizes[index % len(ladder.sizes)]
        ladder.learn(size, took, 0.0)
    below = {size: ladder.seconds[size] for size in ladder.sizes if ladder.seconds[size] <= seconds[size]}
    for periods in range(60):
        ladder.age(1.0 + periods, 1.0)
    for size in ladder.sizes:
        assert ladder.seconds[size] == pytest.approx(below.get(size, seconds[size]))
