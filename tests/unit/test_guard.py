"""The memory guard's decisions, with a clock and levels made here."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.worker.guard import CACHE, COLLECT, HAND_OVER, Guard, LeakLimits, Level, Step

GIB = 1 << 30
START = Level(allocated=100, reserved=100, used=100, total=1000, resident=GIB)
LIMITS = LeakLimits(cache_ratio=0.3, device_ratio=0.8, resident_bytes=GIB, leak_bytes_per_batch=1, cooldown_s=5)


def guard(shared=False, **limits):
    return Guard(replace(LIMITS, **limits), START, 0.0, shared=shared)


def device(used):
    """Return a level with so many bytes in tensors."""
    return replace(START, allocated=used, reserved=used, used=used)


def cached(bytes_):
    """Return a level with so many bytes in the allocator's cache."""
    return replace(START, reserved=100 + bytes_, used=100 + bytes_)


def climb(watch, level, after=None, now_s=10.0, cost_s=0.001):
    """Look and climb; `after`: the level that each rung leaves. Returns the steps."""
    steps = []
    step = watch.look(level, now_s, 0.0)
    while step is not None:
        steps.append(step)
        if step.rung == HAND_OVER:
            break
        level = (after or {}).get(step.rung, level)
        step = watch.released(step, level, now_s, cost_s)
    return [(step.rung, step.trigger) for step in steps]


def test_it_climbs_only_as_far_as_needed():
    assert climb(guard(), cached(400), {COLLECT: cached(200)}) == [(COLLECT, "cache")]
    assert climb(guard(), cached(400), {CACHE: cached(0)}) == [(COLLECT, "cache"), (CACHE, "cache")]
    # What is reserved and cannot be returned is no leak.
    assert climb(guard(), cached(400)) == [(COLLECT, "cache"), (CACHE, "cache")]


def resident(bytes_):
    """Return a level with so many bytes in the process's own memory."""
    return replace(START, resident=bytes_)


def climbs(watch, level_after, turns=30, batches=10):
    """Look after every ten batches, long after the last look; return the highest rung that each climbs, 0 for none."""
    rungs = []
    for turn in range(1, turns + 1):
        for _ in range(batches):
            watch.after_batch()
        level = level_after(turn * batches)
        rungs.append(max((rung for rung, _ in climb(watch, level, now_s=1000.0 * turn)), default=0))
    return rungs


@pytest.mark.parametrize(
    "level_after", [lambda batches: device(100 + 4.5 * batches), lambda batches: resident(GIB + GIB // 120 * batches)]
)
def test_what_releases_leave_growing_with_the_batches_is_handed_over(level_after):
    rungs = climbs(guard(), level_after, turns=20)
    assert [rung for rung in rungs if rung][:3] == [CACHE, CACHE, HAND_OVER]


def leak(batches):
    """Return the level of a device of which each batch keeps a little."""
    return device(100 + 4.5 * batches)


@pytest.mark.parametrize(
    ("start", "limits", "level_after", "is_leak"),
    [
        (START, {}, leak, True),
        (START, {}, lambda _: device(900), False),  # Another process takes its share, once,
        (START, {}, lambda batches: device(820 if batches < 50 else 950), False),  # or in two portions.
        (START, {}, lambda batches: device(100 + 4.5 * batches + (400 if batches > 50 else 0)), True),
        (START, {}, lambda batches: device(700 + 1.5 * batches), False),  # A new worker would hardly lower it.
        (device(900), {}, lambda _: device(900), False),
        (device(700), {}, leak, True),  # The worker before held memory then.
        (START, {"leak_bytes_per_batch": 4}, leak, True),
        (START, {"leak_bytes_per_batch": 5}, leak, False),
        (START, {"shared": True}, leak, False),  # What others take of a host is no leak of this worker.
    ],
)
def test_what_grows_with_the_batches_is_handed_over_and_a_plateau_is_not(start, limits, level_after, is_leak):
    shared = limits.get("shared", False)
    own = {name: limit for name, limit in limits.items() if name != "shared"}
    watch = Guard(replace(LIMITS, **own), start, 0.0, shared=shared)
    assert (HAND_OVER in climbs(watch, level_after, turns=19)) == is_leak


def test_a_release_that_helps_ends_the_suspicion():
    watch = guard()
    assert climbs(watch, lambda batches: device(775 + 4.5 * batches), turns=2) == [CACHE, CACHE]
    watch.after_batch()
    assert climb(watch, device(920), {CACHE: device(200)}, now_s=9e3) == [(COLLECT, "device"), (CACHE, "device")]
    watch.after_batch()
    assert climb(watch, device(960), now_s=1e4)[-1] == (CACHE, "device")


def test_what_a_climb_could_not_lower_is_left_alone_until_it_grows_or_has_fallen():
    watch = guard()
    assert climb(watch, cached(400)) != []
    assert climb(watch, cached(400), now_s=100.0) == []
    assert climb(watch, cached(470), now_s=110.0) != []
    assert climb(watch, cached(100), now_s=120.0) == []
    assert climb(watch, cached(310), now_s=130.0) != []


def test_every_so_many_batches_it_releases_and_never_hands_over():
    watch = guard(policy=3, cooldown_s=0)
    climbs = []
    for number in range(9):
        watch.after_batch()
        climbs.append(climb(watch, START, now_s=100.0 * number))
    assert climbs == [[], [], [(COLLECT, "batches"), (CACHE, "batches")]] * 3


def test_a_climb_that_did_not_help_takes_a_twentieth_of_the_time_and_one_that_helped_what_it_needs():
    for after, busy in ((cached(0), False), (cached(400), True)):
        watch = guard(cooldown_s=1)
        assert climb(watch, cached(400), {COLLECT: after}, now_s=10.0, cost_s=0.09)
        assert not climb(watch, cached(900), now_s=10.9)
        assert bool(climb(watch, cached(900), now_s=13.5)) is not busy
        assert climb(watch, cached(900), now_s=30.0)


def test_out_of_memory_what_the_process_has_allocated_since_its_start_is_a_leak():
    watch = guard()
    watch.after_batch()
    assert watch.exhausted(device(950))
    # Somebody else's, with or without a little of its own; what was so from the start; what it has always had.
    assert not watch.exhausted(replace(START, used=950))
    assert not watch.exhausted(replace(START, allocated=110, used=950))
    assert not watch.exhausted(START)
    assert not guard(shared=True).exhausted(device(950))
    assert not guard(policy="off").exhausted(device(950))


def test_looking_takes_a_hundredth_of_the_time():
    watch = guard()
    assert watch.due(1.0)
    assert watch.look(START, 1.0, 0.002) is None
    assert not watch.due(1.19)
    assert watch.due(1.21)


def test_a_climb_that_takes_too_long_goes_on_after_the_next_batch_if_need_be():
    for left, expected in ((cached(400), Step(CACHE, "cache")), (cached(0), None)):
        watch = guard(budget_s=0.1)
        step = watch.look(cached(400), 10.0, 0.0)
        assert step == Step(COLLECT, "cache")
        assert watch.released(step, cached(400), 10.2, 0.2) is None
        watch.after_batch()
        assert watch.due(10.2)
        assert watch.look(left, 10.2, 0.0) == expected


LEVELS = st.builds(
    Level,
    allocated=st.integers(0, 500),
    reserved=st.integers(500, 1000),
    used=st.integers(0, 1000),
    total=st.just(1000),
    resident=st.integers(GIB // 2, 4 * GIB),
)
TURNS = st.lists(
    st.tuples(LEVELS, LEVELS, LEVELS, st.floats(0.01, 20), st.floats(0, 0.5), st.floats(0, 0.5)), max_size=60
)


@settings(max_examples=200, deadline=None)
@given(turns=TURNS, policy=st.sampled_from(["auto", 5]), shared=st.booleans())
def test_whatever_happens_rungs_come_in_order_within_budget_and_after_the_cool_down(turns, policy, shared):
    watch = guard(shared, policy=policy)
    now_s, ended_s, spent_s, last = 0.0, None, 0.0, None
    for before, collected, released, pause_s, first_s, second_s in turns:
        now_s += pause_s
        watch.after_batch()
        if not watch.due(now_s):
            continue
        step = watch.look(before, now_s, 0.0)
        gap_s = 0.0
        if step is not None and step.rung == COLLECT:
            assert last in (None, CACHE, HAND_OVER, COLLECT)
            if ended_s is not None:
                assert now_s >= ended_s + LIMITS.cooldown_s - 1e-6
            spent_s = 0.0
        while step is not None:
            level = {COLLECT: collected, CACHE: released}.get(step.rung, released)
            if step.rung == HAND_OVER:
                assert last == CACHE
                assert not (shared and step.trigger == "device")
                assert step.trigger in ("device", "resident")
                last = HAND_OVER
                break
            assert step.rung == COLLECT or last == COLLECT
            assert gap_s < LIMITS.budget_s  # No rung begins once the time is spent.
            cost_s = first_s if step.rung == COLLECT else second_s
            now_s, gap_s, spent_s, last, ended_s = now_s + cost_s, gap_s + cost_s, spent_s + cost_s, step.rung, None
            step = watch.released(step, level, now_s, cost_s)
        if last is not None and watch._pending is None and spent_s and ended_s is None:
            ended_s = now_s


def test_a_model_that_was_loaded_meanwhile_is_no_leak_and_what_it_leaves_behind_is():
    watch = guard()
    watch.after_batch()
    watch.held(300)
    assert not watch.exhausted(device(400))
    assert watch.exhausted(device(950))
    watch.held(-300)
    assert watch.exhausted(device(400))
