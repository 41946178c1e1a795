"""A connection whose client does not read ends; one that reads, however it does, above the least rate, is served."""

from __future__ import annotations

import asyncio
import contextlib
import socket

import pytest

from app.http import connection
from app.ingress import sending
from tests.support import uvicorn_server
from tests.support.ahead import Ahead

SIZE = 6_000_000


async def endless(send):
    """As server-sent events are."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    while True:
        await send({"type": "http.response.body", "body": bytes(10_000), "more_body": True})
        await asyncio.sleep(0)


@contextlib.asynccontextmanager
async def listening(monkeypatch):
    """Yield the port of a server that answers much, and the list of its connections that have ended."""
    ended = []

    class Noted(connection.LimitedProtocol):
        def connection_lost(self, error):
            super().connection_lost(error)
            ended.append(self)

    async def app(scope, receive, send):
        if scope["path"] == "/events":
            await endless(send)
        headers = [(b"content-length", b"%d" % SIZE)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": bytes(SIZE)})

    async with uvicorn_server.listening(app, Noted, timeout_graceful_shutdown=1, timeout_keep_alive=1_000_000) as (
        port,
        _,
    ):
        yield port, ended


def connected(port, *lines, path="/"):
    """Connect a client whose system buffers little."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(("127.0.0.1", port))
    client.setblocking(False)
    client.send("\r\n".join((f"GET {path} HTTP/1.1", "host: x", *lines, "", "")).encode())
    return client


async def periods_until(ended):
    """Each as long as it takes until the rate is looked at."""
    clock = Ahead()
    while not ended:
        await asyncio.sleep(0.01)
        clock.put_on(sending.PERIOD_S)


@pytest.mark.parametrize("lines", [(), ("connection: close",)], ids=["kept", "closed"])
@pytest.mark.parametrize("path", ["/", "/events"])
async def test_a_client_that_reads_nothing_is_let_go(monkeypatch, path, lines):
    async with listening(monkeypatch) as (port, ended):
        with connected(port, *lines, path=path):
            await periods_until(ended)


async def test_a_client_that_reads_a_byte_now_and_then_is_let_go(monkeypatch):
    async with listening(monkeypatch) as (port, ended):
        clock = Ahead()
        with connected(port) as client:
            while not ended:
                await asyncio.get_running_loop().sock_recv(client, 1)
                await asyncio.sleep(0.001)
                clock.put_on(sending.PERIOD_S / 20)


async def test_a_slow_client_above_the_least_rate_gets_all_of_it(monkeypatch):
    """Three times the least: a system tells of what a client has in pieces."""
    looked, look = [], sending.SendWatch._look

    def noted(watch):
        looked.append(watch)
        look(watch)

    monkeypatch.setattr(sending.SendWatch, "_look", noted)
    async with listening(monkeypatch) as (port, ended):
        clock, piece = Ahead(), 3 * int(sending.PERIOD_S * sending.LEAST_BYTES_PER_S)
        with connected(port) as client:
            loop, received, passed = asyncio.get_running_loop(), 0, 0
            while received < SIZE:
                data = await loop.sock_recv(client, piece)
                assert data, f"it ended after {received} bytes"
                received += len(data)
                if received // piece > passed:
                    passed += 1
                    clock.put_on(sending.PERIOD_S)
                    await asyncio.sleep(0.001)
            assert len(looked) > 3
            assert not ended
