"""A fork server for real: its children are this process's own, whatever becomes of it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket

import psutil
import pytest

from app.processes import fork_server as fork_server_module
from app.processes.fork_server import ForkServer, begin
from tests.support.load import WAIT_S, until
from tests.support.loop_guard import guarded
from tests.support.small_fork_server import FAILS


@pytest.fixture
def fails(tmp_path, monkeypatch):
    """Return a path: forks fail while a file is there."""
    monkeypatch.setenv(FAILS, str(tmp_path / "fails"))
    return tmp_path / "fails"


@contextlib.asynccontextmanager
async def fork_server_running():
    fork_server = ForkServer(lambda: begin("tests.support.small_fork_server:main"))
    with guarded():
        try:
            yield fork_server
        finally:
            await fork_server.stop()
    assert fork_server_module._adopting == 0
    assert not [child for child in psutil.Process().children() if child.status() == psutil.STATUS_ZOMBIE]


async def forked(fork_server):
    ours, theirs = socket.socketpair()
    with theirs:
        try:
            return await asyncio.wait_for(fork_server.fork(theirs.fileno()), WAIT_S), ours
        except BaseException:
            ours.close()
            raise


async def ended(child, ours, word=b""):
    with ours:
        ours.sendall(word)
    return await asyncio.wait_for(asyncio.shield(child.exited), WAIT_S)


@pytest.mark.parametrize("which", ["first", "second"])
async def test_a_fork_that_fails_costs_no_sibling_and_is_tried_again(fails, which, caplog):
    async with fork_server_running() as fork_server:
        sibling, ours = await forked(fork_server)
        pid = fork_server.pid
        fails.write_text(which)
        forking = asyncio.create_task(forked(fork_server))
        while caplog.text.count("no process can be forked") < 2:
            assert not forking.done()
            await asyncio.sleep(0.01)
        fails.unlink()
        child, others = await forking
        assert fork_server.pid == pid
        assert not sibling.exited.done()
        assert await ended(child, others) == 0
        assert await ended(sibling, ours) == 0


async def test_a_child_that_is_not_wanted_any_more_ends_and_is_reaped(fails):
    before = {each.pid for each in psutil.Process().children()}
    async with fork_server_running() as fork_server:
        child, ours = await forked(fork_server)
        os.kill(fork_server.pid, signal.SIGSTOP)
        forking = asyncio.create_task(forked(fork_server))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert fork_server._place.child.forks, "it has been asked for"
        forking.cancel()
        await asyncio.gather(forking, return_exceptions=True)
        os.kill(fork_server.pid, signal.SIGCONT)
        second, others = await forked(fork_server)
        assert await ended(second, others) == 0
        assert await ended(child, ours) == 0
        await until(lambda: {each.pid for each in psutil.Process().children()} - before == {fork_server.pid})
