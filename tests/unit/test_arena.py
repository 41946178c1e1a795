"""Shared memory: a slot is never handed out twice, and who has one memory sees nothing of the others."""

from __future__ import annotations

import os

import pytest

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


def test_a_slot_is_handed_out_again_only_once_it_was_given_back():
    slots = FreeSlots(3)
    assert sorted(slots.take() for _ in range(3)) == [0, 1, 2]
    with pytest.raises(IndexError):
        slots.take()
    slots.give(1)
    with pytest.raises(KeyError):
        slots.give(1)
    assert (slots.taken, slots.take()) == (2, 1)


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
