"""Connections: heads, silence, refused bodies and clients that do not read are bounded."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import http.client
import json
import re
import socket

import pytest

from app.http import connection, head
from app.ingress import sending
from tests.support import uvicorn_server
from tests.support.load import WAIT_S
from tests.support.uvicorn_server import ask

LONG_S = 1000.0
"""Passes for nobody but by a test's own hand."""


class Ahead:
    """Clock of the running loop of asyncio that a test can put on: events of later seconds happen at once.

    Sockets and threads are real, and so is time otherwise: limits in it are long, so that no busy machine reaches one.
    """

    def __init__(self):
        self._loop = asyncio.get_running_loop()
        self._real_s, self._ahead_s = self._loop.time, 0.0
        vars(self._loop)["time"] = lambda: self._real_s() + self._ahead_s

    def put_on(self, seconds):
        """Let so much time pass. Timers due in it run before anything that came meanwhile, as in uvloop."""
        self._ahead_s += seconds
        due_s, timers = self._loop.time(), self._loop._scheduled
        while timers and timers[0].when() <= due_s:
            timer = heapq.heappop(timers)
            timer._scheduled = False
            self._loop._ready.append(timer)  # A cancelled one does nothing there.
            if timer.cancelled():
                self._loop._timer_cancelled_count -= 1


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
    headers = [(b"content-length", b"%d" % len(body)), *[connection.CLOSE] * (scope["path"] == "/last")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


@contextlib.asynccontextmanager
async def listening(**limits):
    with pytest.MonkeyPatch.context() as patched:
        for name, limit in limits.items():
            for module in (connection, head):
                patched.setattr(module, name, limit, raising=False)
        async with uvicorn_server.listening(app, connection.LimitedProtocol, timeout_graceful_shutdown=1) as (port, _):
            yield port


def code(answers):
    [(status, _, body)] = answers
    return status, json.loads(body)["code"]


@pytest.mark.parametrize("piece", [100, 1 << 16, 1 << 22])
async def test_one_header_is_refused_as_soon_as_it_is_too_large(piece):
    async with listening(HEAD_BYTES=20_000) as port:
        parts = [b"GET / HTTP/1.1\r\nhost: x\r\na: "] + [b"b" * piece] * (1 + 40_000 // piece)
        assert code(await ask(port, *parts)) == (431, "HEADERS_TOO_LARGE")


async def test_many_headers_are_refused():
    async with listening(HEADERS=20) as port:
        fine = b"GET / HTTP/1.1\r\nhost: x\r\n" + b"a: b\r\n" * 19 + b"\r\n"
        assert (await ask(port, fine))[0][0] == 200
        assert code(await ask(port, fine.replace(b"\r\n\r\n", b"\r\nc: d\r\n\r\n"))) == (431, "HEADERS_TOO_LARGE")


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("wish", ["close", "keep-alive"])
@pytest.mark.parametrize("path", ["/", "/last"])
async def test_an_answer_says_once_whether_the_connection_stays(path, wish, version):
    """/last: the service drains."""
    async with listening() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(f"GET {path} HTTP/{version}\r\nhost: x\r\nconnection: {wish}\r\n\r\n".encode())
        answer = await reader.readuntil(b"\r\n\r\n")
        writer.close()
    stays = wish == "keep-alive" and path == "/"
    said = [] if stays and version == "1.1" else [b"keep-alive" if stays else b"close"]
    assert re.findall(rb"connection: (.*)\r\n", answer) == said


async def test_headers_that_do_not_end_are_refused_and_a_silent_connection_is_closed():
    async with listening(_HEAD_TIMEOUT_S=LONG_S) as port:
        clock = Ahead()
        for sent, received in ((b"GET / HTTP/1.1\r\nhost: x\r\n", b"HTTP/1.1 408"), (b"", b"")):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(sent)
            await ask(port, b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")  # Now it has been read.
            clock.put_on(LONG_S)
            assert (await reader.read()).startswith(received)
            writer.close()


async def test_trailers_are_dropped_and_bounded():
    chunked = b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n"
    async with listening(HEAD_BYTES=20_000) as port:
        [(_, _, body)] = await ask(port, chunked + b"x-api-key: mine\r\n\r\n")
        assert body == b"3 host,transfer-encoding"
        flood = [b"a: " + b"b" * 10_000 + b"\r\n"] * 50
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            await ask(port, chunked, *flood)
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
            assert (await ask(port, *parts))[0][2] == b"5 connection,content-length,host"


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


# Heads that RFC 9112 forbids are refused with its statuses.

CHUNK = b"3\r\nabc\r\n0\r\n\r\n"
HEADS = {
    b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" + CHUNK: 200,
    b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: , Chunked\r\n\r\n" + CHUNK: 200,
    b"GET / HTTP/1.0\r\n\r\n": 200,
    b"GET / HTTP/1.1\r\nHost:\r\n\r\n": 200,
    b"GET / HTTP/1.1\r\n\r\n": 400,
    b"GET / HTTP/1.1\r\nHost: x\r\nHost: x\r\n\r\n": 400,
    b"GET / HTTP/1.0\r\nHost: x\r\nhost: y\r\n\r\n": 400,
    b"GET http://x/ HTTP/1.1\r\nHost: X\r\n\r\n": 200,
    b"GET http://x:80/?a HTTP/1.1\r\nHost: x:80\r\n\r\n": 200,
    b"GET http://y/ HTTP/1.1\r\nHost: x\r\n\r\n": 400,
    b"GET http://x@y/ HTTP/1.1\r\nHost: x\r\n\r\n": 400,
    b"GET http://y/ HTTP/1.0\r\n\r\n": 400,
    b"GET / HTTP/2.0\r\nHost: x\r\n\r\n": 505,
    b"\r\nGET / RTSP/1.0\r\nHost: x\r\n\r\n": 400,
    b"SOURCE / ICE/1.0\r\nHost: x\r\n\r\n": 400,
    b"GET /\r\n\r\n": 400,
    b"GET / HTTP/0.9\r\nHost: x\r\n\r\n": 400,
    b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip, chunked\r\n\r\n" + CHUNK: 501,
    b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n\r\n" + CHUNK: 501,
    b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip\r\n\r\n": 400,
    b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked, chunked\r\n\r\n" + CHUNK: 400,
    b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n" + CHUNK: 400,
    b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: identity\r\n\r\n": 400,
    b"POST / HTTP/1.0\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" + CHUNK: 400,
}


async def test_a_head_gets_the_status_that_the_standard_says():
    found = {}
    async with listening() as port:
        for each in HEADS:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(each)
            found[each] = int((await asyncio.wait_for(reader.readline(), WAIT_S)).split()[1])
            writer.close()
    assert found == HEADS


# A connection whose client does not read ends; one that reads, however it does, above the least rate, is served.

SIZE = 6_000_000


@contextlib.asynccontextmanager
async def answering_much():
    """Yield the port of a server that answers much, and the list of its connections that have ended."""
    ended = []

    class Noted(connection.LimitedProtocol):
        def connection_lost(self, error):
            super().connection_lost(error)
            ended.append(self)

    async def app(scope, receive, send):
        if scope["path"] == "/events":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            while True:
                await send({"type": "http.response.body", "body": bytes(10_000), "more_body": True})
                await asyncio.sleep(0)
        headers = [(b"content-length", b"%d" % SIZE)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": bytes(SIZE)})

    async with uvicorn_server.listening(app, Noted, timeout_graceful_shutdown=1, timeout_keep_alive=1_000_000) as (
        port,
        _,
    ):
        yield port, ended


def connected(port, *lines, path="/"):
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(("127.0.0.1", port))
    client.setblocking(False)
    client.send("\r\n".join((f"GET {path} HTTP/1.1", "host: x", *lines, "", "")).encode())
    return client


@pytest.mark.parametrize("lines", [(), ("connection: close",)], ids=["kept", "closed"])
@pytest.mark.parametrize("path", ["/", "/events"])
async def test_a_client_that_reads_nothing_is_let_go(path, lines):
    async with answering_much() as (port, ended):
        clock = Ahead()
        with connected(port, *lines, path=path):
            while not ended:
                await asyncio.sleep(0.01)
                clock.put_on(sending.PERIOD_S)


async def test_a_client_that_reads_a_byte_now_and_then_is_let_go():
    async with answering_much() as (port, ended):
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
    async with answering_much() as (port, ended):
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
