"""The arena is the same memory in a spawned process."""

import multiprocessing

import numpy as np

from app.processes.arena import Arena
from app.processes.channel import Channel, socket_pair


def _double(end, pools):
    channel = Channel(end)
    while not (messages := channel.receive()):
        channel.wait(30)
    assert messages == [b"here it is"]
    arena = Arena.opened(pools, channel.take_descriptor(), channel.take_descriptor())
    arena.slot(0, 1)[:] *= 2
    arena.result(0, 1)[:3] = 5
    assert arena.slot(1, 0).tobytes() == bytes([7]) * 8


def test_a_spawned_process_sees_the_same_memory():
    arena = Arena([(16, 2), (8, 1)])
    arena.slot(0, 1)[:] = np.arange(16)
    arena.slot(1, 0)[:] = 7
    context = multiprocessing.get_context("spawn")
    ours, theirs = socket_pair()
    process = context.Process(target=_double, args=(theirs, arena.pools))
    process.start()
    theirs.close()
    channel = Channel(ours)
    channel.send(b"here it is", arena.descriptors())
    process.join(30)
    assert process.exitcode == 0
    assert (arena.slot(0, 1) == np.arange(16) * 2).all()
    assert (arena.result(0, 1)[:3] == 5).all()
    channel.close()
