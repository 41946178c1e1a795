"""The load generators, against a server that does what a test tells it to."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anychip_tools.benchmark.endpoints import request_bytes
from anychip_tools.benchmark.load import (
    Accepted,
    HttpClient,
    OpenLoad,
    closed_loop,
    open_loop,
    percentile,
    poisson_arrivals,
    read_answer,
)

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
        assert (load.sent, len(load.accepted), load.in_time, load.connection_errors, load.unanswered) == (5, 2, 0, 1, 0)
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


async def test_a_connection_that_is_cut_off_ends_its_part_of_the_closed_loop():
    async with Server(b"") as server:
        load = await closed_loop(HttpClient(server.port, REQUEST).call, 2, WAIT_S)
        assert (load.errors, server.requests) == ({"closed": 2}, 2)


def test_goodput_leaves_out_what_is_late_and_what_comes_after_the_load():
    load = OpenLoad(timeout_s=0.25, seconds=2.0)
    load.accepted = [Accepted(0.5, 0.2), Accepted(1.0, 0.3), Accepted(2.1, 0.1)]
    assert load.in_time == 2
    assert load.goodput_per_s == 0.5


CHUNKED = (
    b"HTTP/1.1 503 Oops\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n2;x=y\r\nok\r\n0\r\nA: b\r\n\r\n"
)


@pytest.mark.parametrize(("answer", "read"), [(reply(), ("200", True)), (CHUNKED, ("503", False))])
async def test_the_end_of_an_answer_is_found_by_its_length_or_its_chunks(answer, read):
    reader = asyncio.StreamReader()
    reader.feed_data(answer + reply("429 Next"))
    assert await read_answer(reader) == read
    assert (await read_answer(reader))[0] == "429"


@pytest.mark.parametrize("answer", [b"HTTP/1.1 200 OK\r\n\r\nok", reply()[:-1], CHUNKED[:-2], b""])
async def test_an_answer_without_an_end_is_cut_off(answer):
    reader = asyncio.StreamReader()
    reader.feed_data(answer)
    reader.feed_eof()
    with pytest.raises(EOFError):
        await read_answer(reader)


@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0, 100))
def test_a_percentile_is_one_of_the_values(values, percent):
    assert percentile(values, percent) in values
    assert percentile(values, 100) == max(values)
    assert percentile(values, 0) == min(values)


def test_arrivals_come_at_the_rate_and_alike_for_a_seed():
    arrivals = poisson_arrivals(100, 50, seed=1)
    assert arrivals == poisson_arrivals(100, 50, seed=1) != poisson_arrivals(100, 50, seed=2)
    assert arrivals == sorted(arrivals)
    assert len(arrivals) == pytest.approx(5000, rel=0.06)  # Four standard deviations.
