"""Relay of gRPC's connections: bytes arrive unchanged, nothing piles up, and everything is given back."""

from __future__ import annotations

import asyncio
import contextlib
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from anychip_grpc.relay import Relay, address_in
from app.ingress.budget import Budget
from tests.support.load import WAIT_S, until

MB = 1 << 20


@contextlib.asynccontextmanager
async def carried(serve):
    """Yield a relay to `serve(reader, writer)`, which stands in for the C core, its port, and its connection budget."""
    budget, running = Budget(16, "connections", least=4), set()

    async def served(reader, writer):
        running.add(writer)
        with contextlib.suppress(ConnectionError):
            await serve(reader, writer)
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
        running.discard(writer)

    relay = Relay(budget, 32)
    with relay.core() as core:
        path = Path(core.removeprefix("unix:"))
        server = await asyncio.start_unix_server(served, path)
    assert not path.parent.exists(), "others could find it"
    await relay.listener.listen("127.0.0.1", 0)
    try:
        yield relay, relay.listener.sockets[0].getsockname()[1], budget
    finally:
        relay.listener.close()
        await relay.wait_closed(0)
        await until(lambda: not running, blocks=False)
        server.close()
    assert not budget.held


async def echo(reader, writer):
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()


@contextlib.asynccontextmanager
async def client(port):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def test_bytes_arrive_as_they_are():
    async with carried(echo) as (_, port, budget), client(port) as (reader, writer):
        sent = os.urandom(5 * MB)
        writer.write(sent)
        assert await asyncio.wait_for(reader.readexactly(len(sent)), WAIT_S) == sent
        assert budget.held == 1
        writer.close()
        await until(lambda: not budget.held, blocks=False)


async def test_the_core_knows_the_address_and_its_end_is_the_clients():
    names = []

    async def ends(_, writer):
        names.append(writer.get_extra_info("peername"))
        writer.write(b"bye")

    async with carried(ends) as (_, port, budget), client(port) as (reader, writer):
        assert await asyncio.wait_for(reader.read(), WAIT_S) == b"bye"
        assert address_in(names[0].decode()) == "127.0.0.1"
        writer.close()
        await until(lambda: not budget.held, blocks=False)


async def test_a_client_with_more_calls_than_it_may_have_loses_its_connection():
    async with carried(echo) as (relay, port, budget), client(port) as (_, writer):
        await until(lambda: relay._open, blocks=False)
        [name] = relay._open
        call = SimpleNamespace(peer=lambda: f"unix-abstract:{name}/127.0.0.1")
        begun, ended = 0, asyncio.Event()

        async def begin():
            nonlocal begun
            relay.begin(call)
            begun += 1
            await ended.wait()

        asked = [asyncio.create_task(begin()) for _ in range(100)]
        await until(lambda: not budget.held, blocks=False)
        assert 8 < begun < 64
        ended.set()
        await asyncio.wait(asked)
        assert sum(each.cancelled() for each in asked) == 100 - begun
        assert not relay.calls.held
        writer.close()


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        ("unix-abstract:0a1b/127.0.0.1", "127.0.0.1"),
        ("unix-abstract:0a1b/2001:db8::1", "2001:db8::1"),
        ("unix-abstract:0a1b/fe80::1%25eth0", "fe80::1%eth0"),
        ("unix:", ""),
    ],
)
def test_a_call_says_where_its_client_is(peer, address):
    assert address_in(peer) == address
