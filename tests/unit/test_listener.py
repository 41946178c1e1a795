"""What is accepted is counted before anything is read of it, and given back however it ends."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket

import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st

from app.http.connection import too_many
from app.ingress import listener
from app.ingress.budget import Budget
from app.ingress.listener import Listener
from tests.support.load import WAIT_S, until


class Echo(asyncio.Protocol):
    def __init__(self):
        self.on_lost = lambda _: None

    def connection_made(self, transport):
        self.transport = transport

    def data_received(self, data):
        self.transport.write(data)

    def connection_lost(self, error):
        self.on_lost(self)


@contextlib.asynccontextmanager
async def listening(connections, protocol=Echo):
    """Yield the port of a listener, and the listener; when it is closed no connection is held any more."""
    served = Listener(protocol, connections, refusal=too_many())
    await served.listen("127.0.0.1", 0)
    try:
        yield served.sockets[0].getsockname()[1], served
    finally:
        served.close()
        await served.wait_closed()
        await until(lambda: not connections.held, blocks=False)


async def asked(port, source="127.0.0.1"):
    reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(source, 0))
    writer.write(b"hello")
    try:
        return await asyncio.wait_for(reader.read(100), WAIT_S)
    finally:
        writer.close()


async def test_an_address_has_its_share_and_hears_why_it_has_no_more():
    connections = Budget(8, "connections")
    async with listening(connections) as (port, _):
        held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(6)]
        assert (await asked(port)).startswith(b"HTTP/1.1 429")
        assert await asked(port, "127.0.0.2") == b"hello"
        for _, writer in held:
            writer.close()
        await until(lambda: not connections.held, blocks=False)
        assert await asked(port) == b"hello"


ENDS = {
    "leaves": lambda client: client.close(),
    "resets": lambda client: (
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, bytes([1] + [0] * 7)),
        client.close(),
    ),
    "says something and leaves": lambda client: (client.send(b"x"), client.close()),
    "stays": lambda client: None,
}


@settings(max_examples=25, deadline=None)
@given(st.lists(st.sampled_from(sorted(ENDS)), max_size=12), st.booleans())
def test_the_count_never_exceeds_the_limit_and_comes_back(ends, yields):
    async def tested():
        connections = Budget(4, "connections")
        with contextlib.ExitStack() as stack:
            async with listening(connections) as (port, _):
                for end in ends:
                    client = stack.enter_context(socket.create_connection(("127.0.0.1", port), WAIT_S))
                    if yields:
                        await asyncio.sleep(0)
                    with contextlib.suppress(OSError):
                        ENDS[end](client)
                    assert connections.held <= connections.most_for_one
                stack.close()

    uvloop.run(tested())


async def test_without_a_descriptor_it_waits_and_goes_on(monkeypatch, caplog):
    monkeypatch.setattr(listener, "_PAUSE_S", 0.01)
    async with listening(Budget(8, "connections")) as (port, served):
        genuine = served.sockets[0]

        class Exhausted:
            left = 3

            def accept(self):
                if self.left:
                    self.left -= 1
                    raise OSError(errno.EMFILE, "too many open files")
                return genuine.accept()

            def __getattr__(self, name):
                return getattr(genuine, name)

        loop, exhausted = asyncio.get_running_loop(), Exhausted()
        loop.remove_reader(genuine)
        served.sockets[0] = exhausted
        loop.add_reader(genuine, served._accept, exhausted)
        assert await asked(port) == b"hello"
        assert exhausted.left == 0
    assert [record.message for record in caplog.records].count(
        "nothing can be accepted for now: [Errno 24] too many open files"
    ) == 1
