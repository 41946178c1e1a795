"""The arena is the same memory in a process that was spawned."""

import multiprocessing

import numpy as np

from app.workers.arena import Arena


def _double(connection):
    arena = Arena.received(connection.recv(), connection)
    arena.slot(0, 1)[:] *= 2
    connection.send(arena.slot(1, 0).tobytes())


def test_a_spawned_process_sees_the_same_memory():
    arena = Arena([(16, 2), (8, 1)])
    arena.slot(0, 1)[:] = np.arange(16)
    arena.slot(1, 0)[:] = 7
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_double, args=(theirs,))
    process.start()
    theirs.close()
    ours.send(arena.pools)
    arena.send(ours, process.pid)
    assert ours.recv() == bytes([7]) * 8
    process.join(30)
    assert process.exitcode == 0
    assert (arena.slot(0, 1) == np.arange(16) * 2).all()
    ours.close()
