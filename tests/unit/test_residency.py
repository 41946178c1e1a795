"""Which models are resident: the budget, who goes, and how often, whatever is asked for."""

from collections import Counter

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
    expected_s = policy.ask(name, now, lambda each: each == name, "one")
    return expected_s, settle(policy, now, lambda each: each == name)


def test_the_least_recently_used_goes_but_not_within_so_many_load_times_and_never_while_somebody_waits():
    policy = rig(500, 200, 200, 200)
    asked(policy, "m0", 0.0)
    asked(policy, "m1", 1.0)
    policy.ask("m0", 2.0, nobody, "one")
    expected_s, loaded = asked(policy, "m2", 5.0)
    assert loaded == []
    assert expected_s == pytest.approx(1.0 + KEPT - 5.0 + 1.0)  # m1, as m0 was used since.
    both = {"m1", "m2"}
    policy.ask("m2", 20.0, lambda name: name in both, "one")
    assert settle(policy, 20.0, lambda name: name in both) == ["m2"]
    assert [each.name for each in policy.placed(Place.RESIDENT)] == [
        "m2",
        "m1",
    ]  # m1 was used longest ago, and is busy.


histories = st.lists(
    st.tuples(
        st.sampled_from(["use"] * 6 + ["hold", "drop", "slow", "fail"]),
        st.integers(0, 4),
        st.sampled_from([0.001, 0.13, 0.57, 2.3, 11.7]),
    ),
    min_size=20,
    max_size=120,
)
sizes = st.lists(st.integers(150, 500), min_size=5, max_size=5)
load_times = st.lists(st.sampled_from([0.05, 0.2, 1.0, 4.0, 20.0]), min_size=5, max_size=5)


@settings(max_examples=300, deadline=None)
@given(histories, sizes, load_times)
def test_whatever_happens_the_budget_holds_nobody_in_use_goes_and_loads_have_a_bound(events, sizes_mb, loads_s):
    """Requests that are answered once their model is there, that hold theirs until dropped, slow loads, failures."""
    tenants = [
        Tenant(f"m{number}", size * MB, load_s)
        for number, (size, load_s) in enumerate(zip(sizes_mb, loads_s, strict=True))
    ]
    policy = Residency(1000 * MB, tenants)
    waiting: set[str] = set()
    held: set[str] = set()
    resident_s: dict[str, float] = {}
    asked_s: dict[str, float] = {}
    paid: list[tuple[float, float]] = []  # When others left for a load, and what that load takes.
    now, for_others = 0.0, False
    for kind, number, passes in events:
        name = f"m{number}"
        now += passes
        if kind in ("use", "hold"):
            held |= {name} if kind == "hold" else set()
            waiting.add(name)
            asked_s[name] = now
            if policy.ask(name, now, waiting.__contains__, "one") == 0 and name not in held:
                waiting.discard(name)
        elif kind == "drop":
            held.discard(name)
            waiting.discard(name)
        for each in policy.placed(Place.LOADING):
            if kind not in ("slow", "fail"):
                policy.loaded(each.name, now, each.memory_bytes, each.load_s)
                resident_s[each.name] = now
                waiting -= {each.name} - held
            elif kind == "fail":
                policy.failed(each.name, now)
                waiting.discard(each.name)
                held.discard(each.name)
        for each in policy.placed(Place.LEAVING):
            policy.left(each.name, now)
        leave, load = policy.next(now, waiting.__contains__)
        for each in leave:
            assert each not in waiting
            assert now - resident_s[each] >= KEPT * policy.tenants[each].load_s
        if leave:
            for_others = True
            paid.append((now, 0.0))
        if load is not None:
            assert load in waiting or now <= asked_s[load] + 60
            if for_others:
                paid[-1] = (paid[-1][0], policy.tenants[load].load_s)
            for_others = False
        assert policy.taken_bytes <= policy.budget_bytes
        assert len(policy.placed(Place.LOADING)) <= 1
    for first in range(len(paid)):
        for last in range(first, len(paid)):
            window_s = paid[last][0] - paid[first][0]
            taken_s = sum(load_s for _, load_s in paid[first : last + 1])
            assert taken_s <= MOST_S + SHARE * window_s + max(loads_s) + 1e-6


def test_what_nobody_can_wait_for_is_loaded_for_those_who_ask_again():
    """Its load takes longer than any deadline."""
    policy = rig(300, 200, load_s=40.0)
    assert policy.ask("m0", 0.0, lambda name: name == "m0") == 40.0
    assert settle(policy, 0.1, nobody) == ["m0"]
    assert policy.ask("m0", 41.0, nobody) == 0.0


def competed(policy, wants, seconds, load_s=1.0):
    """Clients that always have a request under way for each model that they want; how long each model was there."""
    there, now = Counter(), 0.0
    busy = {name for names in wants.values() for name in names}.__contains__
    while now < seconds:
        for client, names in wants.items():
            for name in names:
                policy.ask(name, now, busy, client)
        for each in policy.placed(Place.LEAVING):
            policy.left(each.name, now)
        for each in policy.placed(Place.LOADING):
            if now >= each.since_s + load_s:
                policy.loaded(each.name, now, each.memory_bytes, load_s)
        policy.next(now, busy)
        there.update(each.name for each in policy.placed(Place.RESIDENT))
        assert policy.taken_bytes <= policy.budget_bytes
        now += 0.1
    return {name: ticks / 10 for name, ticks in there.items()}


def test_a_client_that_keeps_models_busy_keeps_nobody_else_out():
    policy = rig(400, 200, 200, 200)
    there = competed(policy, {"greedy": ["m0", "m1"], "modest": ["m2"]}, 1200.0)
    assert there["m2"] > 1100  # It comes once, and stays: each of the two has one.
    assert policy.tenants["m2"].place is Place.RESIDENT


def test_only_so_many_clients_are_remembered_of_a_model():
    policy = rig(200, 200)
    for number in range(1000):
        policy.ask("m0", float(number), nobody, f"client {number}")
    assert len(policy.tenants["m0"].clients) == 64
    assert "client 999" in policy.tenants["m0"].clients
