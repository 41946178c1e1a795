"""The memory guard's decisions, with a clock and levels made here; and what a worker tells of its releases."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from app.worker import memory
from app.worker.memory import Guard, MemoryWatch
from app.worker.messages import CACHE, COLLECT, HAND_OVER, Released, Stats
from backends import Memory, Telemetry

GIB = 1 << 30
START = Stats(allocated=100, reserved=100, used=100, total=1000, resident=GIB)


class SmallGuard(Guard):
    device_ratio, cache_ratio = 0.8, 0.3
    resident_bytes = GIB
    leak_bytes_per_batch = 1


def guard(policy="auto", start=START, *, shared=False, **limits):
    return type("Guarded", (SmallGuard,), limits)(policy, start, 0.0, shared=shared)


def device(used):
    return replace(START, allocated=used, reserved=used, used=used)


def hands_over(watch, level_after):
    """Look after every ten batches, long after the last look, and climb as far as the guard says."""
    for turn in range(1, 20):
        for _ in range(10):
            watch.after_batch()
        level, now_s = level_after(10 * turn), 1000.0 * turn
        step = watch.look(level, now_s, 0.0)
        while step is not None:
            if step.release == HAND_OVER:
                return True
            step = watch.released(step, level, now_s, 0.001)
    return False


def leak(batches):
    """Return the level of a device of which each batch keeps a little."""
    return device(100 + 4.5 * batches)


@pytest.mark.parametrize(
    ("start", "limits", "level_after", "is_leak"),
    [
        (START, {}, leak, True),
        (START, {}, lambda batches: replace(START, resident=GIB + GIB // 120 * batches), True),
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
    assert hands_over(guard(start=start, **limits), level_after) == is_leak


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


LEVELS = st.builds(
    Stats,
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
    watch = guard(policy, shared=shared)
    now_s, ended_s, spent_s, last = 0.0, None, 0.0, None
    for before, collected, released, pause_s, first_s, second_s in turns:
        now_s += pause_s
        watch.after_batch()
        if not watch.due(now_s):
            continue
        step = watch.look(before, now_s, 0.0)
        gap_s = 0.0
        if step is not None and step.release == COLLECT:
            assert last in (None, CACHE, HAND_OVER, COLLECT)
            if ended_s is not None:
                assert now_s >= ended_s + watch.cooldown_s - 1e-6
            spent_s = 0.0
        while step is not None:
            level = {COLLECT: collected, CACHE: released}.get(step.release, released)
            if step.release == HAND_OVER:
                assert last == CACHE
                assert not (shared and step.trigger == "device")
                assert step.trigger in ("device", "resident")
                last = HAND_OVER
                break
            assert step.release == COLLECT or last == COLLECT
            assert gap_s < watch.budget_s  # No release level begins once the time is spent.
            cost_s = first_s if step.release == COLLECT else second_s
            now_s, gap_s, spent_s, last, ended_s = now_s + cost_s, gap_s + cost_s, spent_s + cost_s, step.release, None
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


class Card:
    """A backend whose release gives back bytes of the device and pinned memory of the host."""

    name = "card"
    facts = SimpleNamespace(host_memory=False)

    def __init__(self) -> None:
        self.used, self.resident = 1000, 5000

    def memory(self, device: str) -> Memory:
        return Memory(100, self.used, self.used, 10_000)

    def telemetry(self, device: str) -> Telemetry:
        return Telemetry()

    def release_cache(self, device: str) -> int:
        self.used -= 300
        self.resident -= 40
        return 300


def test_a_release_on_demand_tells_device_and_host_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    card: Any = Card()

    def collect() -> None:
        card.used -= 20
        card.resident -= 7

    monkeypatch.setattr(memory, "_resident", lambda: card.resident)
    monkeypatch.setattr(memory, "gc", SimpleNamespace(collect=collect))
    assert MemoryWatch(card, "card:0", "off").release() == Released("request", {1: 20, 2: 300}, {1: 7, 2: 40})
