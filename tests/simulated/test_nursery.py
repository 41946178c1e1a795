"""A nursery for real: its children are this process's own, whatever becomes of it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket

import psutil
import pytest

from app.processes import nursery as nursery_module
from app.processes.nursery import Nursery, spawned
from tests.support.load import WAIT_S, until
from tests.support.small_nursery import FAILS
from tests.support.stall import running_loop

pytestmark = pytest.mark.paired


@pytest.fixture
def fails(tmp_path, monkeypatch):
    """The file that makes forks fail while it is there."""
    monkeypatch.setenv(FAILS, str(tmp_path / "fails"))
    return tmp_path / "fails"


@contextlib.asynccontextmanager
async def nursing():
    nursery = Nursery(lambda: spawned("tests.support.small_nursery:main"))
    async with running_loop():
        try:
            yield nursery
        finally:
            await nursery.stop()
    assert nursery_module._adopting == 0
    assert not [child for child in psutil.Process().children() if child.status() == psutil.STATUS_ZOMBIE]


async def forked(nursery):
    """A child, and our end of its socket."""
    ours, theirs = socket.socketpair()
    with theirs:
        try:
            return await asyncio.wait_for(nursery.fork(theirs.fileno()), WAIT_S), ours
        except BaseException:
            ours.close()
            raise


async def ended(child, ours, word=b""):
    """The child's exit status, once it was told to end."""
    with ours:
        ours.sendall(word)
    return await asyncio.wait_for(asyncio.shield(child.exited), WAIT_S)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_children_are_ours_and_outlive_their_nursery(fails, number):
    async with nursing() as nursery:
        child, ours = await forked(nursery)
        assert psutil.Process(child.pid).ppid() == os.getpid()
        first = nursery.pid
        os.kill(first, number)
        # Of the next nursery, where the first one does not answer.
        second, others = await forked(nursery)
        assert nursery.pid != first
        assert await ended(second, others, b"\7") == 7
        assert not child.exited.done()
        assert await ended(child, ours, b"\3") == 3
        assert not psutil.pid_exists(first)


@pytest.mark.parametrize("which", ["first", "second"])
async def test_a_fork_that_fails_costs_no_sibling_and_is_tried_again(fails, which, caplog):
    async with nursing() as nursery:
        sibling, ours = await forked(nursery)
        pid = nursery.pid
        fails.write_text(which)
        forking = asyncio.create_task(forked(nursery))
        while caplog.text.count("no process can be forked") < 2:
            assert not forking.done()
            await asyncio.sleep(0.01)
        fails.unlink()
        child, others = await forking
        assert nursery.pid == pid
        assert not sibling.exited.done()
        assert await ended(child, others) == 0
        assert await ended(sibling, ours) == 0


async def test_a_child_that_is_not_wanted_any_more_ends_and_is_reaped(fails):
    before = {each.pid for each in psutil.Process().children()}
    async with nursing() as nursery:
        child, ours = await forked(nursery)
        os.kill(nursery.pid, signal.SIGSTOP)
        forking = asyncio.create_task(forked(nursery))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert nursery._forks, "it has been asked for"
        forking.cancel()
        await asyncio.gather(forking, return_exceptions=True)
        os.kill(nursery.pid, signal.SIGCONT)
        second, others = await forked(nursery)
        assert await ended(second, others) == 0
        assert await ended(child, ours) == 0
        await until(lambda: {each.pid for each in psutil.Process().children()} - before == {nursery.pid})


async def test_a_nursery_that_cannot_be_begun_is_an_error():
    def begin():
        raise OSError("no memory")

    nursery = Nursery(begin)
    with pytest.raises(ConnectionError, match="no memory"):
        await nursery.fork()
    await nursery.stop()
