"""Which models are resident: the budget, who goes, and how often, whatever is asked for."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.scheduling.residency import KEPT, MOST_S, SHARE, Place, Residency, Tenant

MB = 1 << 20


def rig(budget_mb, *sizes_mb, load_s=1.0):
    return Residency(budget_mb * MB, [Tenant(f"m{number}", size * MB, load_s) for number, size in enumerate(sizes_mb)])


def nobody(_):
    return False


def settle(policy, now, busy):
    """Everything that may happen now happens at once; the names that were loaded."""
    loaded = []
    for _ in range(50):
        leave, load = policy.next(now, busy)
        for name in leave:
            policy.left(name, now)
        if load is not None:
            tenant = policy.tenants[load]
            policy.loaded(load, now, tenant.memory_bytes, tenant.load_s)
            loaded.append(load)
        elif not leave:
            break
    return loaded


def asked(policy, name, now):
    """Somebody asks for a model and waits for it; what is loaded, and how long that was said to take."""
    expected_s = policy.ask(name, now, lambda each: each == name)
    return expected_s, settle(policy, now, lambda each: each == name)


def test_a_model_is_loaded_where_there_is_room_and_stays():
    policy = rig(500, 200, 200, 200)
    assert asked(policy, "m0", 0.0) == (1.0, ["m0"])
    assert asked(policy, "m1", 0.5) == (1.0, ["m1"])
    assert asked(policy, "m0", 1.0) == (0.0, [])
    assert policy.taken_bytes == 400 * MB


def test_the_least_recently_used_goes_but_not_within_so_many_load_times_and_never_while_somebody_waits():
    policy = rig(500, 200, 200, 200)
    asked(policy, "m0", 0.0)
    asked(policy, "m1", 1.0)
    policy.ask("m0", 2.0, nobody)
    expected_s, loaded = asked(policy, "m2", 5.0)
    assert loaded == []
    assert expected_s == pytest.approx(1.0 + KEPT - 5.0 + 1.0)  # m1, as m0 was used since.
    both = {"m1", "m2"}
    policy.ask("m2", 20.0, lambda name: name in both)
    assert settle(policy, 20.0, lambda name: name in both) == ["m2"]
    assert [each.name for each in policy.placed(Place.RESIDENT)] == [
        "m2",
        "m1",
    ]  # m1 was used longest ago, and is busy.


def test_what_is_always_asked_for_stays_while_one_that_was_asked_for_once_may_not_go():
    policy = rig(500, 200, 200, 200)
    asked(policy, "m0", 0.0)
    asked(policy, "m1", 90.0)
    policy.ask("m0", 94.0, nobody)
    expected_s, loaded = asked(policy, "m2", 95.0)
    assert loaded == []  # m1 was loaded five load times ago; m0, which is asked for all the time, does not go for that.
    assert expected_s == pytest.approx(90.0 + KEPT - 95.0 + 1.0)
    policy.ask("m0", 100.0, nobody)
    assert settle(policy, 100.0, lambda name: name == "m2") == ["m2"]
    assert [each.name for each in policy.placed(Place.RESIDENT)] == ["m0", "m2"]


def test_one_that_was_not_used_for_its_load_time_goes_before_one_that_may_not():
    policy = rig(500, 200, 200, 200)
    policy.tenants["m1"].load_s = 100.0
    asked(policy, "m0", 0.0)
    asked(policy, "m1", 0.0)
    policy.ask("m0", 1.0, nobody)
    assert asked(policy, "m2", 1.0 + KEPT - 0.5)[1] == []
    assert asked(policy, "m2", 1.0 + KEPT)[1] == ["m2"]


def test_where_all_are_busy_nothing_can_be_expected():
    policy = rig(500, 200, 200, 200)
    asked(policy, "m0", 0.0)
    asked(policy, "m1", 0.0)
    assert policy.ask("m2", 100.0, lambda _: True) == math.inf


def test_one_that_failed_is_not_tried_again_at_once():
    policy = rig(500, 200)
    policy.ask("m0", 0.0, lambda _: True)
    assert policy.next(0.0, lambda _: True) == ((), "m0")
    policy.failed("m0", 1.0)
    assert asked(policy, "m0", 2.0) == (10.0, [])
    assert asked(policy, "m0", 11.0) == (1.0, ["m0"])


def test_what_takes_more_than_it_did_makes_others_go():
    policy = rig(500, 200, 200)
    asked(policy, "m0", 0.0)
    policy.ask("m1", 1.0, lambda name: name == "m1")
    assert policy.next(1.0, lambda name: name == "m1") == ((), "m1")
    policy.loaded("m1", 2.0, 400 * MB, 1.0)
    assert policy.next(2.0, lambda name: name == "m1") == (["m0"], None)


def test_who_left_before_a_load_began_causes_none():
    policy = rig(300, 200, 200)
    asked(policy, "m0", 0.0)
    policy.ask("m1", 1.0, lambda name: name == "m1")
    assert settle(policy, 100.0, nobody) == []


def test_an_adversary_that_asks_for_all_in_turn_is_refused_and_causes_no_storm():
    policy, loads, refused, now = rig(1000, *[200] * 20, load_s=2.0), 0, 0, 0.0
    while now < 3600:
        for number in range(20):
            expected_s, loaded = asked(policy, f"m{number}", now)
            loads += len(loaded)
            refused += expected_s > 5
            now += 0.1
    assert (MOST_S + SHARE * 3600) / 2 * 0.5 < loads <= 5 + (MOST_S + SHARE * 3600) / 2 + 1
    assert refused > 10_000


steps = st.lists(
    st.tuples(st.sampled_from(["ask", "finish", "fail", "drop"]), st.integers(0, 7), st.floats(0, 8, allow_nan=False)),
    max_size=120,
)


@settings(max_examples=300, deadline=None)
@given(
    steps,
    st.lists(st.integers(50, 400), min_size=8, max_size=8),
    st.lists(st.floats(0.05, 20, allow_nan=False), min_size=8, max_size=8),
)
def test_whatever_happens_the_budget_holds_nobody_in_use_goes_and_loads_have_a_bound(events, sizes_mb, loads_s):
    """Any order of requests, ends of loads, failures and clients that leave."""
    tenants = [
        Tenant(f"m{number}", size * MB, load_s)
        for number, (size, load_s) in enumerate(zip(sizes_mb, loads_s, strict=True))
    ]
    policy = Residency(1000 * MB, tenants)
    waiting: set[str] = set()
    resident_s: dict[str, float] = {}
    asked_s: dict[str, float] = {}
    paid: list[tuple[float, float]] = []  # When others left for a load, and what that load takes.
    now, for_others = 0.0, False
    for kind, number, passes in events:
        name = f"m{number}"
        now += passes
        if kind == "ask":
            waiting.add(name)
            asked_s[name] = now
            assert policy.ask(name, now, waiting.__contains__) >= 0
        elif kind == "drop":
            waiting.discard(name)
        for each in policy.placed(Place.LOADING):
            if kind == "finish":
                policy.loaded(each.name, now, each.memory_bytes, each.load_s)
                resident_s[each.name] = now
            elif kind == "fail":
                policy.failed(each.name, now)
        for each in policy.placed(Place.LEAVING):
            policy.left(each.name, now)
        leave, load = policy.next(now, waiting.__contains__)
        for each in leave:
            assert each not in waiting
            left = policy.tenants[each]
            assert now - resident_s[each] >= KEPT * left.load_s
            for other in policy.placed(Place.RESIDENT):  # One that was used less recently and may not go yet.
                if other.name not in waiting and other.used_s < left.used_s:
                    free = now - resident_s[other.name] >= KEPT * other.load_s
                    assert free or now - left.used_s >= KEPT * left.load_s
        for_others = bool(leave) or for_others
        if leave:
            paid.append((now, 0.0))
        if load is not None:
            assert load in waiting or now <= asked_s[load] + 60
            if for_others:
                paid[-1] = (paid[-1][0], policy.tenants[load].load_s)
            for_others = False
        assert policy.taken_bytes <= policy.budget_bytes
        assert len(policy.placed(Place.LOADING)) <= 1
    longest_s = max(loads_s)
    for first in range(len(paid)):
        for last in range(first, len(paid)):
            window_s = paid[last][0] - paid[first][0]
            assert sum(load_s for _, load_s in paid[first : last + 1]) <= MOST_S + SHARE * window_s + longest_s + 1e-6


def test_what_nobody_can_wait_for_is_loaded_for_those_who_ask_again():
    """Its load takes longer than any deadline."""
    policy = rig(300, 200, load_s=40.0)
    assert policy.ask("m0", 0.0, lambda name: name == "m0") == 40.0
    assert settle(policy, 0.1, nobody) == ["m0"]
    assert policy.ask("m0", 41.0, nobody) == 0.0
