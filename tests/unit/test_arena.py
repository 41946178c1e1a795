"""Shared memory: a slot is never handed out twice, and who has one memory sees nothing of the others."""

from __future__ import annotations

import os

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from app.processes.arena import ROOM, Arena, Blocks, FreeSlots

MB = 1 << 20


def test_the_memory_cannot_be_taken_away_by_whoever_has_its_descriptor():
    arena = Arena([(10, 1)])
    for descriptor in arena.descriptors():
        with pytest.raises(PermissionError):
            os.ftruncate(descriptor, 0)
        os.close(descriptor)


def test_closing_keeps_slots_in_use_alive_and_may_be_repeated():
    arena = Arena([(4, 1)])
    slot = arena.slot(0, 0)
    arena.close()
    arena.close()
    slot[:] = 9
    assert slot.tolist() == [9] * 4
    with pytest.raises(ValueError, match="closed"):
        arena.slot(0, 0)


class FreeSlotsMachine(RuleBasedStateMachine):
    COUNT = 5

    def __init__(self):
        super().__init__()
        self.slots = FreeSlots(self.COUNT)
        self.taken = []

    @precondition(lambda self: len(self.taken) < self.COUNT)
    @rule()
    def take(self):
        slot = self.slots.take()
        assert slot not in self.taken
        assert 0 <= slot < self.COUNT
        self.taken.append(slot)

    @precondition(lambda self: len(self.taken) == self.COUNT)
    @rule()
    def take_too_many(self):
        with pytest.raises(IndexError):
            self.slots.take()

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def give(self, data):
        slot = data.draw(st.sampled_from(self.taken))
        self.slots.give(slot)
        self.taken.remove(slot)
        with pytest.raises(KeyError):
            self.slots.give(slot)

    @invariant()
    def none_is_lost(self):
        assert self.slots.taken == len(self.taken)


TestFreeSlots = FreeSlotsMachine.TestCase


def test_who_has_one_memory_sees_nothing_of_the_others() -> None:
    whole = Arena([(10, 3), (5000, 2), (10, 4)], [0, 1, 0])
    for pool, (_, count) in enumerate(whole.pools):
        for index in range(count):
            whole.slot(pool, index)[:] = 10 * pool + index
    apart = Arena.opened(whole.pools_in(1), *whole.descriptors(1))
    assert [count for _, count in apart.pools] == [0, 2, 0]
    assert [apart.slot(1, index)[-1] for index in range(2)] == [10, 11]
    for pool in (0, 2):
        with pytest.raises(IndexError):
            apart.slot(pool, 0)
    assert [os.fstat(each).st_size for each in apart.descriptors()] == [2 * 8192]
    everything = Arena.opened(whole.pools, *whole.descriptors(), memories=whole.memories)
    assert [everything.slot(pool, 1)[0] for pool in range(3)] == [1, 11, 21]
    shared = Arena.opened(whole.pools_in(0), *whole.descriptors(0))
    assert [shared.slot(pool, 1)[0] for pool in (0, 2)] == [1, 21]


def test_a_block_is_used_again_whether_its_memory_was_kept_or_not() -> None:
    blocks = Blocks(ROOM * 64 * MB)
    for size in (1000, 3 * MB):
        start = blocks.write(b"a" * size)
        blocks.give(start, size)
        assert blocks.write(b"b" * size) == start
        assert bytes(blocks._view[start : start + size]) == b"b" * size
    os.close(blocks.descriptor)
