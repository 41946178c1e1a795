"""The hot routes' own protocol: what it answers, what it leaves to uvicorn, and how connections go on afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
import tracemalloc
from functools import partial
from types import SimpleNamespace

import pytest

from app import clock
from app.compat import torchserve
from app.errors import ServiceError
from app.http import connection, hot
from app.ingress.budget import Budget
from app.ingress.context import UNKNOWN, Interruption, RequestContext
from tests.support import uvicorn_server
from tests.support.load import until
from tests.support.uvicorn_server import ask, read

PREDICT = b"/v1/models/m:predict"
MAX_BODY_BYTES = 2_000_000
LARGE_BYTES = 10_000_000


class Wanted:
    """What the route does with requests: tells their size, or what their model's name says."""

    def __init__(self):
        self.bodies = Budget(50_000_000, "bytes")
        self.events = []
        self.ended = []
        self.reached = asyncio.Event()
        self.go_on = asyncio.Event()
        self.administration = SimpleNamespace(draining=False)

    async def answer(self, ingress, request, model, version=""):
        assert ingress.wanted is self
        if model == "refused":
            raise ServiceError("MODEL_NOT_FOUND", "there is none", headers=[(b"x-more", b"1")])
        with self.bodies.lease("c") as lease, Interruption(deadline_s=clock.monotonic() + 60) as limit:
            body = await request.body(MAX_BODY_BYTES, lease, limit)
        if model == "broken":
            raise ValueError("a fault of ours")
        if model == "waits":
            await request.watched(self._wait, lambda: self.events.append("left"))
        if model == "written":
            await request.watched(partial(asyncio.sleep, 0), lambda: self.events.append("left"))
            await self._wait()
        if model == "large":
            return (content := bytes(LARGE_BYTES)), [(b"content-length", b"%d" % len(content))]
        content = b"%s %s %d" % (model.encode(), version.encode(), sum(body))
        return content, [(b"content-type", b"text/plain"), (b"content-length", b"%d" % len(content))]

    async def _wait(self):
        self.reached.set()
        try:
            await self.go_on.wait()
        except asyncio.CancelledError:
            self.events.append("cancelled")
            raise


async def general(scope, receive, send):
    more = True
    while more:
        message = await receive()
        more = message.get("more_body", False)
    headers = [(b"content-length", b"7")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b"general"})


@contextlib.asynccontextmanager
async def listening(monkeypatch):
    asyncio.get_running_loop().hear_the_network()
    wanted = Wanted()
    counted = SimpleNamespace(labels=lambda *_: SimpleNamespace(inc=lambda: None))
    link = SimpleNamespace(
        settings=SimpleNamespace(max_body_bytes=MAX_BODY_BYTES, log_requests=False, origins=()),
        tracing=None,
        administration=wanted.administration,
        metrics=SimpleNamespace(requests=counted),
    )
    routes = tuple((path, route, wanted.answer) for path, route, _ in hot.ROUTES)
    monkeypatch.setattr(hot, "ROUTES", routes)
    monkeypatch.setattr(
        RequestContext, "_record", lambda context, _: wanted.ended.append((context.status, context.code))
    )
    access = SimpleNamespace(admit=lambda *_: UNKNOWN)
    ingress = SimpleNamespace(link=link, access=access, wanted=wanted, bodies=wanted.bodies)
    protocol = hot.protocol(ingress, more=[(*torchserve.HOT[:2], wanted.answer)])
    times = {"timeout_graceful_shutdown": 5, "timeout_keep_alive": 75}
    async with uvicorn_server.listening(general, protocol, **times) as (port, server):
        yield SimpleNamespace(port=port, wanted=wanted, server=server)
    assert wanted.bodies.held == 0


def post(path=PREDICT, body=b"\x01\x02", *lines, version=b"1.1"):
    head = [b"POST %b HTTP/%b" % (path, version), b"host: x", b"content-length: %d" % len(body), *lines]
    return b"\r\n".join(head) + b"\r\n\r\n" + body


@contextlib.contextmanager
def nothing_kept(size):
    """Check that the block frees all that it allocates but `size` bytes, before any garbage is collected."""
    gc.collect()
    gc.disable()
    tracemalloc.start()
    try:
        yield
        kept = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
        gc.enable()
    assert kept < size


class Wire:
    """A transport that keeps how much it was given at once."""

    def __init__(self, transport, sizes):
        self.within, self.sizes = transport, sizes

    def __getattr__(self, name):
        return getattr(self.within, name)

    def write(self, data):
        self.sizes.append(len(data))
        self.within.write(data)

    def writelines(self, parts):
        self.sizes.append(sum(map(len, parts)))
        self.within.writelines(parts)


@pytest.mark.parametrize("encrypted", [False, True])
async def test_a_large_answer_leaves_in_pieces(monkeypatch, encrypted):
    """Else all of it would be sent, or encrypted, within one turn of the event loop: 100 MB took it 100 ms."""
    sizes = []
    made = hot.HotProtocol.connection_made
    monkeypatch.setattr(hot.HotProtocol, "connection_made", lambda self, wire: made(self, Wire(wire, sizes)))
    monkeypatch.setattr(connection.LimitedProtocol, "encrypted", encrypted)
    async with listening(monkeypatch) as service:
        [(status, _, content)] = await ask(service.port, post(b"/v1/models/large:predict"))
    assert (status, content) == (200, bytes(LARGE_BYTES))
    assert sum(sizes) > LARGE_BYTES
    assert max(sizes) == (65536 if encrypted else 1 << 20)


async def test_a_large_answer_that_is_given_up_ends_its_connection(monkeypatch):
    """Another answer after a part of it would be read as the rest."""
    async with listening(monkeypatch) as service:
        reader, writer = await asyncio.open_connection("127.0.0.1", service.port, limit=1000)
        writer.write(post(b"/v1/models/large:predict") + post())
        assert b"200" in await reader.readline()
        [task] = service.server.server_state.tasks
        task.cancel()
        with contextlib.suppress(ConnectionResetError):
            assert len(await asyncio.wait_for(reader.read(), 30)) < LARGE_BYTES
        writer.close()
        await asyncio.wait((task,))


async def test_a_connection_that_ends_in_the_turn_of_its_request_leaves_nothing(monkeypatch):
    came = hot.HotProtocol.buffer_updated
    monkeypatch.setattr(
        hot.HotProtocol, "buffer_updated", lambda self, size: (came(self, size), self._transport.abort())
    )
    async with listening(monkeypatch) as service:
        await ask(service.port, post(), answers=0)
        await until(lambda: service.wanted.ended, blocks=False)
        assert not service.server.server_state.tasks


async def test_the_task_of_a_connection_ends_with_it(monkeypatch):
    async with listening(monkeypatch) as service:
        before = asyncio.all_tasks()
        reader, writer = await asyncio.open_connection("127.0.0.1", service.port)
        for _ in range(2):
            writer.write(post())
            assert (await read(reader))[0] == 200
            [task] = asyncio.all_tasks() - before
        writer.close()
        await asyncio.wait_for(asyncio.wait((task,)), 30)
        assert asyncio.all_tasks() == before


@pytest.mark.parametrize("model", ["refused", "leaves", "waits"])
async def test_a_body_does_not_outlive_its_request(monkeypatch, model):
    body = bytes(1_000_000)
    async with listening(monkeypatch) as service:
        with nothing_kept(2_000_000):
            for _ in range(10):
                begun = post(b"/v1/models/%b:predict" % model.encode(), body)
                if model == "waits":
                    _, writer = await asyncio.open_connection("127.0.0.1", service.port)
                    writer.write(begun)
                    await service.wanted.reached.wait()
                    service.wanted.reached.clear()
                    writer.close()
                    await until(lambda: not service.server.server_state.connections, blocks=False)
                    continue
                if model == "refused":
                    assert (await ask(service.port, begun))[0][0] == 404
                    continue
                await ask(service.port, begun[:900_000], answers=0)
                await until(lambda: service.wanted.bodies.held == 0, blocks=False)
            await until(lambda: not service.server.server_state.connections, blocks=False)
            del begun


async def test_an_ordinary_request_is_answered_here_with_every_header(monkeypatch):
    async with listening(monkeypatch) as service:
        [(status, headers, body)] = await ask(service.port, post(PREDICT + b"?top_k=1", b"\x07", b"X-Request-Id: mine"))
        assert (status, body) == (200, b"m  7")
        assert headers["x-request-id"] == "mine"
        assert headers["content-type"] == "text/plain"
        assert {"date", "server-timing"} <= headers.keys()
        assert "connection" not in headers
        for path, expected in {
            b"/v2/models/a.b/versions/1/infer": b"a.b 1 3",
            b"/v2/models/m/infer": b"m  3",
            b"/predictions/m": b"m  3",
            b"/predictions/m/1": b"m 1 3",
        }.items():
            assert (await ask(service.port, post(path)))[0][2] == expected
        assert service.wanted.ended == [(200, "OK")] * 5


OTHER_WAYS = {
    "split": (post()[:30], post()[30:]),
    "chunked": (
        post(PREDICT, b"", b"transfer-encoding: chunked").replace(b"content-length: 0\r\n", b"") + b"0\r\n\r\n",
    ),
    "h2c": (post(PREDICT, b"ab", b"upgrade: h2c"),),
    "many headers": (post(PREDICT, b"ab", *[b"a: b"] * 99),),
    "escaped": (post(b"/v1/models/m%41:predict"),),
    "no name": (post(b"/v1/models/a/b:predict"),),
    "another route": (post(b"/v2/models/m/ready"),),
    "method": (post().replace(b"POST", b"PUT"),),
    "digits": (post().replace(b": 2", b": " + b"0" * 5000 + b"2"),),
    "bare newlines": (post().replace(b"\r\n", b"\n").replace(b"\n\n", b"\r\n\r\n"),),
}


@pytest.mark.parametrize("way", OTHER_WAYS)
async def test_what_is_not_ordinary_goes_the_general_way(monkeypatch, way):
    async with listening(monkeypatch) as service:
        reader, writer = await asyncio.open_connection("127.0.0.1", service.port)
        writer.transport.get_extra_info("socket").setsockopt(6, 1, 1)
        for part in OTHER_WAYS[way]:
            writer.write(part)
            await asyncio.sleep(0.02)  # Or both parts would come as one.
        _, headers, body = await read(reader)
        assert (body, "content-type" in headers) != (b"m  3", True)
        writer.close()
        assert service.wanted.ended == []


async def test_a_body_larger_than_what_is_received_at_once_is_whole(monkeypatch):
    body = bytes([1, 2, 3, 4]) * 400_000
    async with listening(monkeypatch) as service:
        whole = post(PREDICT, body)
        pieces = [whole[at : at + 90_001] for at in range(0, len(whole), 90_001)]
        for parts in ([whole], pieces, [whole[:-1], whole[-1:]]):
            assert (await ask(service.port, *parts))[0][2] == b"m  %d" % sum(body)


async def test_requests_of_both_ways_follow_each_other_on_a_connection(monkeypatch):
    both = post() + b"GET / HTTP/1.1\r\nhost: x\r\n\r\n" + post(PREDICT, b"\x05")
    async with listening(monkeypatch) as service:
        answers = await ask(service.port, both + post(PREDICT, bytes(300_000)) + both, answers=7)
        assert {status for status, _, _ in answers} == {200}
        assert answers[0][2] == b"m  3"
        reader, writer = await asyncio.open_connection("127.0.0.1", service.port)
        for _ in range(3):
            for part, expected in ((post(), b"m  3"), (b"GET / HTTP/1.1\r\nhost: x\r\n\r\n", b"general")):
                writer.write(part)
                assert (await read(reader))[2] == expected
        writer.close()


async def test_a_fault_of_ours_is_answered_and_the_connection_goes_on(monkeypatch):
    async with listening(monkeypatch) as service:
        answers = await ask(service.port, post(b"/v1/models/broken:predict"), post(), answers=2)
        assert [status for status, _, _ in answers] == [500, 200]
        assert b"INTERNAL" in answers[0][2]
        assert service.wanted.ended[0] == (500, "INTERNAL")


@pytest.mark.parametrize("size", [2, 1_900_000])
async def test_a_request_refused_before_its_body_is_answered_and_the_next_one_read(monkeypatch, size):
    async with listening(monkeypatch) as service:
        answers = await ask(service.port, post(b"/v1/models/refused:predict", bytes(size)), post(), answers=2)
        assert [status for status, _, _ in answers] == [404, 200]
        assert answers[0][1]["x-more"] == "1"
        [(status, headers, _)] = await ask(
            service.port, post(b"/v1/models/refused:predict", bytes(size), b"connection: close")
        )
        assert (status, headers["connection"]) == (404, "close")


@pytest.mark.parametrize("why", ["asked", "1.0", "draining"])
async def test_a_connection_is_closed_where_the_answer_says_so(monkeypatch, why):
    async with listening(monkeypatch) as service:
        service.wanted.administration.draining = why == "draining"
        lines = (b"Connection: close",) if why == "asked" else ()
        reader, writer = await asyncio.open_connection("127.0.0.1", service.port)
        writer.write(post(PREDICT, b"a", *lines, version=b"1.0" if why == "1.0" else b"1.1"))
        _, headers, _ = await read(reader)
        assert headers["connection"] == "close"
        assert await asyncio.wait_for(reader.read(), 30) == b""
        writer.close()


async def test_a_stop_waits_for_the_answer_that_is_under_way_and_closes_idle_connections(monkeypatch):
    async with listening(monkeypatch) as service:
        idle, other = await asyncio.open_connection("127.0.0.1", service.port)
        reader, writer = await asyncio.open_connection("127.0.0.1", service.port)
        other.write(post())
        await read(idle)
        writer.write(post(b"/v1/models/waits:predict"))
        await service.wanted.reached.wait()
        service.server.should_exit = True
        assert await asyncio.wait_for(idle.read(), 30) == b""
        service.wanted.go_on.set()
        status, headers, _ = await read(reader)
        assert (status, headers["connection"]) == (200, "close")
        for each in (other, writer):
            each.close()


@pytest.mark.parametrize(
    ("model", "ended", "events"), [("waits", (0, "CANCELLED"), ["left", "cancelled"]), ("written", (0, "OK"), [])]
)
async def test_a_client_that_leaves_ends_what_is_computed_and_not_what_is_written(monkeypatch, model, ended, events):
    """A cancelled conversion of a large answer would end its process."""
    async with listening(monkeypatch) as service:
        _, writer = await asyncio.open_connection("127.0.0.1", service.port)
        writer.write(post(b"/v1/models/%b:predict" % model.encode()))
        await service.wanted.reached.wait()
        writer.close()
        await asyncio.sleep(0.05)
        service.wanted.go_on.set()
        await until(lambda: service.wanted.ended, blocks=False)
    assert (service.wanted.ended, service.wanted.events) == ([ended], events)


async def test_an_idle_connection_is_closed_after_its_time_and_not_while_it_is_answered(monkeypatch):
    monkeypatch.setattr(connection, "_HEAD_TIMEOUT_S", 0.2)
    async with listening(monkeypatch) as service:
        reader, writer = await asyncio.open_connection("127.0.0.1", service.port)
        writer.write(post(b"/v1/models/waits:predict"))
        await service.wanted.reached.wait()
        await asyncio.sleep(0.5)
        service.wanted.go_on.set()
        assert (await read(reader))[0] == 200
        writer.write(b"POST ")
        assert (await read(reader))[0] == 408
        writer.close()


NAMES = (b"Content-Type", b"x-a", b"X-Request-Id", b"Connection", b"Transfer-Encoding", b"Host")
VALUES = (b"close", b"keep-alive", b"2", b"02", b"+2", b"2, 2", b"", b" a\tb ", b"\xe4", b"a:b;c=d", b"\0")
SIZES = ([], [b"0"], *[[b"2"]] * 8, [b" 2 "], [b"02"], [b"+2"], [b"2, 2"], [b"2", b"2"])
TARGETS = (
    *[PREDICT] * 6,
    PREDICT + b"?top_k=3&x",
    PREDICT + b"?a#b",
    b"/v1/models/m%20n:predict",
    b"/v1/models//m:predict",
    b"/v2/models/m/versions//infer",
    b"http://x/v1/models/m:predict",
    b"/predictions/m",
)


async def echo(scope, receive, send):
    body, more = b"", True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        body, more = body + message.get("body", b""), message.get("more_body", False)
    content = seen(scope, body)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(content))]})
    await send({"type": "http.response.body", "body": content})


def seen(scope, body):
    return repr((scope["method"], scope["path"], scope["query_string"], scope["headers"], body)).encode()


@pytest.mark.parametrize("version", [b"1.1", b"1.0"])
async def test_a_head_is_read_as_uvicorn_reads_it_or_left_to_it(monkeypatch, version):
    answered_here = []

    async def echoed(ingress, request, *names):
        with Budget(1000, "bytes").lease("c") as lease, Interruption(deadline_s=clock.monotonic() + 60) as limit:
            content = seen(request.scope, bytes(await request.body(MAX_BODY_BYTES, lease, limit)))
        answered_here.append(content)
        return content, [(b"content-length", b"%d" % len(content))]

    monkeypatch.setattr(hot, "ROUTES", tuple((path, route, echoed) for path, route, _ in hot.ROUTES))
    monkeypatch.setattr(RequestContext, "_record", lambda *_: None)
    monkeypatch.setattr(hot, "common_headers", lambda *_: [])
    link = SimpleNamespace(settings=SimpleNamespace(max_body_bytes=MAX_BODY_BYTES, origins=()), tracing=None)
    access = SimpleNamespace(admit=lambda *_: UNKNOWN)
    ingress = SimpleNamespace(link=link, access=access, bodies=Budget(1000, "bytes"))
    ours, theirs = hot.protocol(ingress, more=[(*torchserve.HOT[:2], echoed)]), connection.LimitedProtocol

    async def answered(port, data):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(data)
        try:
            return await asyncio.wait_for(read(reader), 1)
        except asyncio.TimeoutError:
            return "it waits for more"
        except asyncio.IncompleteReadError:
            return "it hangs up"
        finally:
            writer.close()

    async with (
        uvicorn_server.listening(echo, ours, timeout_graceful_shutdown=1) as (port, _),
        uvicorn_server.listening(echo, theirs, timeout_graceful_shutdown=1) as (other, _),
    ):
        for number in range(100):
            source = random.Random(number)
            sizes = source.choice(SIZES)
            lines = [b"POST %b HTTP/%b" % (source.choice(TARGETS), version)]
            lines += [b"Host: x"] * source.choice((0, 1, 1, 1, 1, 1, 2))
            lines += [b"Content-Length: " + size for size in sizes]
            for _ in range(source.randrange(4)):
                line = source.choice(NAMES) + b": " + source.choice(VALUES)
                lines.insert(source.randrange(1, len(lines) + 1), line)
            data = b"\r\n".join(lines) + b"\r\n\r\n" + (b"ab" if sizes and sizes != [b"0"] else b"")
            found, expected = await answered(port, data), await answered(other, data)
            for answer in (found, expected):
                if not isinstance(answer, str):
                    for name in ("date", "x-request-id"):
                        answer[1].pop(name, None)
            if found[0] != 200:  # The request's id is in the body of an error.
                found, expected = found[:2], expected[:2]
            assert found == expected, data
    assert len(answered_here) > 15
