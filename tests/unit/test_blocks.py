"""Blocks of shared memory: what the system gets back of them."""

from __future__ import annotations

import os

from app.processes.blocks import ROOM, Blocks

MB = 1 << 20


def resident(blocks: Blocks) -> int:
    """Return the bytes of memory that the system has given for the blocks."""
    return os.fstat(blocks.descriptor).st_blocks * 512


def test_free_blocks_of_many_sizes_keep_little_memory() -> None:
    blocks = Blocks(ROOM * 64 * MB)
    for size in (1000 << 10, 500 << 10, 250 << 10, 120 << 10, 60 << 10, 30 << 10):
        places = [blocks.write(b"x" * size) for _ in range(48 * MB // size)]
        assert resident(blocks) >= 45 * MB
        for start in places:
            blocks.give(start, size)
        assert resident(blocks) <= 17 * MB
    os.close(blocks.descriptor)


def test_a_block_is_used_again_whether_its_memory_was_kept_or_not() -> None:
    blocks = Blocks(ROOM * 64 * MB)
    for size in (1000, 3 * MB):
        start = blocks.write(b"a" * size)
        blocks.give(start, size)
        assert blocks.write(b"b" * size) == start
        assert bytes(blocks._view[start : start + size]) == b"b" * size
    os.close(blocks.descriptor)
