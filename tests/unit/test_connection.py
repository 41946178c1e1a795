"""Answers leave in one piece, large ones without being held back; heads, connections and refused bodies are bounded."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import re

import pytest

from app.http import connection
from app.http.one_piece import OnePiece
from tests.support import uvicorn_server
from tests.support.ahead import Ahead

LONG_S = 1000.0
"""Passes for nobody but by a test's own hand."""


class Wire:
    def __init__(self):
        self.sent = []
        self.closed = False

    def write(self, data):
        assert not self.closed
        self.sent.append(data)

    def close(self):
        self.closed = True

    def is_closing(self):
        return self.closed

    def get_extra_info(self, name):
        return f"the {name}"


async def test_what_is_written_in_one_turn_leaves_together():
    wire = Wire()
    transport = OnePiece(wire)
    transport.write(b"head ")
    transport.write(b"body")
    assert wire.sent == []
    await asyncio.sleep(0)
    assert wire.sent == [b"head body"]
    transport.write(b"next")
    await asyncio.sleep(0)
    assert wire.sent == [b"head body", b"next"]


async def test_much_is_not_held_back():
    wire = Wire()
    transport = OnePiece(wire)
    transport.write(b"head ")
    transport.write(bytes(100_000))
    assert [len(data) for data in wire.sent] == [100_005]
    await asyncio.sleep(0)
    assert len(wire.sent) == 1


async def test_closing_sends_what_is_left_and_nothing_after():
    wire = Wire()
    transport = OnePiece(wire)
    transport.write(b"last words")
    transport.close()
    assert wire.sent == [b"last words"]
    await asyncio.sleep(0)
    assert wire.sent == [b"last words"]


async def test_what_is_held_back_for_a_client_that_leaves_meanwhile_is_dropped():
    wire = Wire()
    OnePiece(wire).write(b"more of a stream")
    wire.close()
    await asyncio.sleep(0)
    assert wire.sent == []


async def app(scope, receive, send):
    """Answers a POST with the length of its body, refuses /refused before reading it."""
    status, size, more = 200, 0, scope["path"] != "/refused"
    if not more:
        status = 413
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        size, more = size + len(message.get("body", b"")), message.get("more_body", False)
    names = b",".join(name for name, _ in scope["headers"])
    body = b"%d %s" % (size, names)
    headers = [(b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


@contextlib.asynccontextmanager
async def listening(**limits):
    """Yield the port of a server with these limits."""
    with pytest.MonkeyPatch.context() as patched:
        for name, limit in limits.items():
            patched.setattr(connection, name, limit)
        async with uvicorn_server.listening(app, connection.LimitedProtocol, timeout_graceful_shutdown=1) as (port, _):
            yield port


async def asked(port, *parts):
    """Send these bytes; return the first answer's head and body."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        for part in parts:
            writer.write(part)
            with contextlib.suppress(ConnectionError):
                await writer.drain()
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 30)
        length = int(re.search(rb"content-length: (\d+)", head)[1])
        return head, await reader.readexactly(length)
    finally:
        writer.close()


def code(answer):
    head, body = answer
    return int(head.split()[1]), json.loads(body)["code"]


@pytest.mark.parametrize("piece", [100, 1 << 16, 1 << 22])
async def test_one_header_is_refused_as_soon_as_it_is_too_large(piece):
    async with listening(HEAD_BYTES=20_000) as port:
        parts = [b"GET / HTTP/1.1\r\nhost: x\r\na: "] + [b"b" * piece] * (1 + 40_000 // piece)
        assert code(await asked(port, *parts)) == (431, "HEADERS_TOO_LARGE")


async def test_many_headers_are_refused():
    async with listening(HEADERS=20) as port:
        fine = b"GET / HTTP/1.1\r\nhost: x\r\n" + b"a: b\r\n" * 19 + b"\r\n"
        assert (await asked(port, fine))[0].startswith(b"HTTP/1.1 200")
        assert code(await asked(port, fine.replace(b"\r\n\r\n", b"\r\nc: d\r\n\r\n"))) == (431, "HEADERS_TOO_LARGE")


async def test_headers_that_do_not_end_are_refused_and_a_silent_connection_is_closed():
    async with listening(_HEAD_TIMEOUT_S=LONG_S) as port:
        clock = Ahead()
        for sent, received in ((b"GET / HTTP/1.1\r\nhost: x\r\n", b"HTTP/1.1 408"), (b"", b"")):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(sent)
            await asked(port, b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")  # Now it has been read.
            clock.put_on(LONG_S)
            assert (await reader.read()).startswith(received)
            writer.close()


async def test_time_in_which_the_server_was_stopped_is_not_the_clients():
    """As with SIGSTOP and SIGCONT: its timers come late, and before it reads."""
    async with listening(_HEAD_TIMEOUT_S=LONG_S) as port:
        clock = Ahead()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n")
        await asked(port, b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")  # Now it has been read.
        writer.write(b"\r\n")
        clock.put_on(2 * LONG_S)
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        writer.close()


async def test_trailers_are_dropped_and_bounded():
    chunked = b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n"
    async with listening(HEAD_BYTES=20_000) as port:
        _, body = await asked(port, chunked + b"x-api-key: mine\r\n\r\n")
        assert body == b"3 host,transfer-encoding"
        flood = [b"a: " + b"b" * 10_000 + b"\r\n"] * 50
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            await asked(port, chunked, *flood)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        writer.close()


async def test_an_upgrade_to_http_2_is_ignored_and_the_body_kept():
    request = (
        b"POST / HTTP/1.1\r\nConnection: Upgrade, HTTP2-Settings\r\nContent-Length: 5\r\nHost: x\r\n"
        b"HTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA\r\nUpgrade: h2c\r\n\r\n"
    )
    async with listening() as port:
        for parts in ((request + b"image",), (request, b"im", b"age"), (request[:70], request[70:] + b"image")):
            assert (await asked(port, *parts))[1] == b"5 connection,content-length,host"


@pytest.mark.parametrize("keep_alive", [False, True], ids=["urllib", "keep-alive"])
async def test_a_client_that_is_still_sending_reads_why_it_was_refused(keep_alive):
    """Sends all of its body before it reads, as urllib and requests do."""

    def ask(port):
        client = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        headers = {} if keep_alive else {"Connection": "close"}
        client.request("POST", "/refused", bytes(30_000_000), headers)
        answer = client.getresponse()
        found = answer.status, answer.read()
        if keep_alive:  # And what comes next on that connection is a request of its own.
            client.request("POST", "/", b"image")
            assert client.getresponse().status == 200
        client.close()
        return found[0]

    async with listening() as port:
        for _ in range(5):
            assert await asyncio.to_thread(ask, port) == 413


async def test_a_refused_client_that_never_stops_sending_is_cut_off(monkeypatch):
    monkeypatch.setattr(connection, "_LINGER_BYTES", 1 << 20)
    async with listening() as port:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST /refused HTTP/1.1\r\nhost: x\r\ncontent-length: 100000000000\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            for _ in range(10_000):
                writer.write(bytes(100_000))
                await writer.drain()
            raise AssertionError("a gigabyte was taken")
        writer.close()


async def test_a_refused_client_that_says_nothing_more_is_let_go(monkeypatch):
    monkeypatch.setattr(connection, "_LINGER_IDLE_S", LONG_S)
    async with listening() as port:
        clock = Ahead()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST /refused HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: 100000\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 413")
        clock.put_on(LONG_S)
        await reader.read()
        writer.close()
