"""Memory goes back to the system when large bodies are over, and not while any is held."""

from __future__ import annotations

import asyncio
import gc

import pytest

from app.ingress import trim
from app.ingress.budget import Budget
from app.ingress.trim import Trim

MIB = 1 << 20


class Released:
    def __init__(self):
        self.times, self.event = 0, asyncio.Event()
        self.loop = asyncio.get_running_loop()

    def __call__(self):
        self.times += 1
        self.loop.call_soon_threadsafe(self.event.set)


@pytest.fixture
async def heap():
    budget, released = Budget(1000 * MIB, "bytes"), Released()
    heap = Trim(budget, released, quiet_s=0)
    yield budget, released
    await heap.close()


def request(budget, size):
    with budget.lease("a") as lease:
        lease.take(size)


async def turns():
    for _ in range(3):
        await asyncio.sleep(0)


async def test_many_bodies_one_after_the_other_end_in_one_release(heap):
    budget, released = heap
    for _ in range(15):
        request(budget, MIB)
    await turns()
    assert released.times == 0
    request(budget, MIB)
    await released.event.wait()
    for _ in range(15):
        request(budget, MIB)
    await turns()
    assert released.times == 1, "what was released is not counted again"


async def test_nothing_is_released_while_a_body_is_held(heap):
    budget, released = heap
    with budget.lease("other") as held:
        request(budget, 16 * MIB)
        held.take(1)
        await turns()
        assert released.times == 0
    await released.event.wait()
    assert released.times == 1


async def test_room_that_was_given_back_unused_does_not_count(heap):
    budget, released = heap
    for _ in range(100):
        with budget.lease("a") as lease:
            await lease.wait(40 * MIB)
            lease.give(40 * MIB - 100)
    await turns()
    assert released.times == 0


async def test_what_is_frozen_is_not_counted_when_memory_is_released(monkeypatch):
    """`gc.get_freeze_count` walks over it: with 430,000 objects the event loop waits 50 ms for the interpreter."""
    counted, collected = [], []
    monkeypatch.setattr(gc, "get_freeze_count", lambda: counted.append(True))
    monkeypatch.setattr(gc, "collect", lambda: collected.append(True))
    monkeypatch.setattr(gc, "freeze", lambda: None)
    before = gc.get_threshold()
    trim._release()
    assert not collected, "at the start there are hundreds of thousands of objects to walk over"
    try:
        trim.freeze()
        trim._release()
    finally:
        gc.set_threshold(*before)
    assert (len(collected), counted) == (2, [])
