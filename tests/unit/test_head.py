"""Heads that RFC 9112 forbids are refused with its statuses, whichever way they come."""

from __future__ import annotations

import asyncio

import pytest

from app.http.connection import LimitedProtocol
from app.http.head import refusal_of
from tests.support import uvicorn_server
from tests.support.load import WAIT_S

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
    b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: identity\r\n\r\n": 400,
    b"POST / HTTP/1.0\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" + CHUNK: 400,
}


async def app(scope, receive, send):
    while (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body"})


async def test_a_head_gets_the_status_that_the_standard_says():
    found = {}
    async with uvicorn_server.listening(app, LimitedProtocol, timeout_graceful_shutdown=1) as (port, _):
        for head in HEADS:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(head)
            found[head] = int((await asyncio.wait_for(reader.readline(), WAIT_S)).split()[1])
            writer.close()
    assert found == HEADS


@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_codings_are_counted_over_all_their_lines(version):
    refusal = refusal_of(version, [(b"host", b"x"), *[(b"transfer-encoding", b"chunked")] * 2])
    assert refusal is not None
    assert refusal.status == 400
