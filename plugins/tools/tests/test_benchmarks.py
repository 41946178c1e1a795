"""The load generators, against a server that does what a test tells it to."""

from __future__ import annotations

import asyncio
import contextlib
import gc

import pytest

from anychip_tools.benchmark.load import HttpClient, closed_loop, open_loop, request_bytes

WAIT_S = 60
REQUEST = request_bytes("/x", b"body", "text/plain")


def reply(status="200 OK", *headers):
    return "\r\n".join((f"HTTP/1.1 {status}", "Content-Length: 2", *headers, "", "ok")).encode()


class Server:
    """Answers each request with the next of `replies`, the last one for ever; None: never; b"": hangs up."""

    def __init__(self, *replies):
        self.replies = list(replies)
        self.requests = 0
        self.connections = 0
        self.open = 0
        self._tasks = set()
        self.changed = asyncio.Condition()

    async def _serve(self, reader, writer):
        self._tasks.add(asyncio.current_task())
        self.connections += 1
        self.open += 1
        try:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                while True:
                    await reader.readexactly(len(REQUEST))
                    await self._count("requests", 1)
                    answer = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
                    if answer == b"":
                        break
                    if answer is not None:
                        writer.write(answer)
        finally:
            writer.close()
            await self._count("open", -1)
            self._tasks.discard(asyncio.current_task())

    async def _count(self, name, step):
        async with self.changed:
            setattr(self, name, getattr(self, name) + step)
            self.changed.notify_all()

    async def until(self, condition):
        async with self.changed:
            await asyncio.wait_for(self.changed.wait_for(condition), WAIT_S)

    async def __aenter__(self):
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_):
        self._server.close()
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def opened(server, due_s, *, seconds=0.0, linger_s=WAIT_S):
    client = HttpClient(server.port, REQUEST)
    load = await open_loop(client.call, due_s, seconds=seconds, timeout_s=WAIT_S, linger_s=linger_s)
    client.close()
    await server.until(lambda: server.open == 0)
    return load


async def test_it_never_waits_for_an_answer_and_leaves_no_connection():
    async with Server(None) as server:
        load = await opened(server, [0.0] * 20, linger_s=0.5)
        assert server.connections == 20
        assert (load.sent, load.unanswered, load.goodput_per_s) == (20, 20, 0)


@pytest.mark.parametrize(("headers", "connections"), [((), 1), (("Connection: close",), 5)])
async def test_an_idle_connection_is_used_again_unless_the_server_closes_it(headers, connections):
    async with Server(reply("200 OK", *headers)) as server:
        client = HttpClient(server.port, REQUEST)
        assert [await client.call() for _ in range(5)] == ["200"] * 5
        assert server.connections == connections
        client.close()
        await server.until(lambda: server.open == 0)


async def test_outcomes_are_told_apart():
    replies = (reply(), reply("503 Service Unavailable"), reply("429 Too Many Requests"), b"", reply())
    async with Server(*replies) as server:
        load = await opened(server, [-2 * WAIT_S] * 5)  # Due long ago: answered at once, and late.
        assert dict(load.refused) == {"503": 1, "429": 1}
        assert (load.sent, len(load.accepted), load.connection_errors, load.unanswered) == (5, 2, 1, 0)
        assert min(answer.latency_s for answer in load.accepted) > load.timeout_s
        assert min(load.lateness_s) >= 2 * WAIT_S


async def test_the_closed_loop_sends_the_next_when_the_last_is_answered():
    async with Server(reply(), reply("500 Oops"), reply()) as server:
        client = HttpClient(server.port, REQUEST)
        load = await closed_loop(client.call, 2, 0.2)
        client.close()
        assert server.connections == 2
        assert load.errors == {"500": 1}
        assert len(load.latencies_s) == server.requests - 1
        assert load.answers_per_s > 0
        await server.until(lambda: server.open == 0)


async def test_a_closed_loop_that_is_cancelled_leaves_no_error_for_the_log(caplog):
    waiting = asyncio.Event()

    async def never():
        waiting.set()
        await asyncio.Event().wait()

    load = asyncio.ensure_future(closed_loop(never, 2, 60.0))
    await waiting.wait()
    load.cancel()
    await asyncio.wait((load,))
    del load
    gc.collect()
    assert caplog.records == []
