"""When the next worker is started after deaths, by a clock of the test's own."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from app.processes.breaker import BROKEN_S, IN_A_ROW, IN_WINDOW, WINDOW_S, Breaker


def pauses(deaths, between_s=1.0, **each):
    """Return the pauses after so many deaths, each so long after the end of the pause before, and the breaker."""
    breaker, now_s, found = Breaker(), 1000.0, []
    for _ in range(deaths):
        found.append(breaker.died(now_s, **each))
        now_s += found[-1] + between_s
    return found, breaker


def test_workers_that_answer_nothing_are_started_after_growing_pauses_and_then_once_a_minute():
    found, breaker = pauses(7)
    assert found == [0.0, 0.5, 2.0, 5.0, BROKEN_S, BROKEN_S, BROKEN_S]
    assert breaker.reason == "7 workers died in a row"


def test_workers_that_answer_a_batch_and_die_break_the_replica_too():
    found, breaker = pauses(12, answered=True)
    assert found == [0.0, 0.0, 0.0, 0.5, 2.0, 5.0, 5.0, 5.0, 5.0, BROKEN_S, BROKEN_S, BROKEN_S]
    assert sum(found[:9]) < WINDOW_S
    assert breaker.reason == "10 workers died within 60 s"


def test_a_death_now_and_then_costs_no_pause():
    found, breaker = pauses(100, between_s=WINDOW_S / 3 + 0.1, answered=True, served_s=20.0)
    assert set(found) == {0.0}
    assert not breaker.reason


def test_a_broken_replica_is_tried_once_a_minute_until_a_worker_has_served_for_one():
    _, breaker = pauses(IN_WINDOW, answered=True)
    now_s = 1000.0 + 10 * WINDOW_S
    assert breaker.died(now_s, answered=True, served_s=WINDOW_S - 1) == BROKEN_S
    now_s += 10 * WINDOW_S
    assert breaker.died(now_s, answered=True, served_s=WINDOW_S) == 0.0
    assert not breaker.reason


@given(st.lists(st.tuples(st.booleans(), st.floats(0.0, 30.0)), min_size=1, max_size=200))
def test_however_workers_die_a_window_has_no_more_starts_than_it_may(lives):
    """`lives`: whether each worker answered, and how long it served."""
    breaker, now_s, started = Breaker(), 0.0, []
    for answered, served_s in lives:
        started.append(now_s)
        now_s += served_s
        now_s += breaker.died(now_s, answered=answered, served_s=served_s)
    for index, first_s in enumerate(started):
        assert sum(each_s - first_s <= WINDOW_S for each_s in started[index:]) <= IN_WINDOW + 1
    silent = [answered for answered, _ in lives[-IN_A_ROW:]]
    assert breaker.reason or any(silent) or len(lives) < IN_A_ROW
