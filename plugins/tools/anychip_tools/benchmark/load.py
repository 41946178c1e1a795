"""HTTP load on a server, over keep-alive connections.

Closed loop (`drive`): each connection sends its next request when the last is answered; finds the capacity.
Open loop (`drive_open`): requests are sent when they are due, even if earlier ones are unanswered; shows a server
under more load than it can answer.

Owns: connections, the times of requests, latencies and the result of each request. Small on purpose: on two cores the
generator must not be the bottleneck; where it is, the lateness of its requests shows it.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import resource
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar, cast

from anychip_tools.benchmark.wire import Address, AnswerReader, Where, WireAnswer

T = TypeVar("T")

HOST = "127.0.0.1"
# uvloop's timers count whole milliseconds: without this, a short sleep returns at once and spins on the server's core.
_TIMER_STEP_S = 0.001
# uvicorn closes a connection after 5 idle seconds; a request sent at that moment would be lost.
_LONGEST_IDLE_S = 3.0


class _Connection(asyncio.Protocol):
    def __init__(self) -> None:
        self.transport: asyncio.Transport
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._reader = AnswerReader()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        answer = self._reader.feed(data)
        if answer:
            self.answered(answer)

    def answered(self, answer: WireAnswer) -> None:
        raise NotImplementedError

    def connection_lost(self, error: Exception | None) -> None:
        if not self.closed.done():
            self.closed.set_result(None)


@dataclass
class ClosedLoad:
    """Results of a closed loop. Latencies in seconds, of answers with status 200; `errors` by status or exception."""

    seconds: float = 0.0
    latencies_s: list[float] = field(default_factory=list)
    errors: dict[str, int] = field(default_factory=dict)

    @property
    def answers_per_s(self) -> float:
        """Answers with status 200 a second."""
        return len(self.latencies_s) / self.seconds if self.seconds else 0.0

    def percentile_ms(self, percent: float) -> float:
        """Return the latency in milliseconds under which `percent` of the answers stayed."""
        return percentile(self.latencies_s, percent) * 1e3


class _ClosedLoopConnection(_Connection):
    def __init__(self, request: bytes, load: ClosedLoad, deadline_s: float) -> None:
        super().__init__()
        self._request = request
        self._load = load
        self._deadline_s = deadline_s
        self._done = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._send()

    def _send(self) -> None:
        self._started_s = time.perf_counter()
        self.transport.write(self._request)

    def answered(self, answer: WireAnswer) -> None:
        now_s = time.perf_counter()
        if answer.status == "200":
            self._load.latencies_s.append(now_s - self._started_s)
        else:
            self._count(answer.status)
        if now_s >= self._deadline_s:
            self._done = True
            self.transport.close()
        else:
            self._send()

    def connection_lost(self, error: Exception | None) -> None:
        if not self._done:
            self._count(type(error).__name__ if error else "closed")
        super().connection_lost(error)

    def _count(self, error: str) -> None:
        self._load.errors[error] = self._load.errors.get(error, 0) + 1


async def closed_loop(where: Where, request: bytes, connections: int, seconds: float) -> ClosedLoad:
    """Load a server for `seconds`; return when every connection has its last answer."""
    load = ClosedLoad()
    started_s = time.perf_counter()
    opened: list[_ClosedLoopConnection] = []
    try:
        for _ in range(connections):
            connection = await _connected(where, lambda: _ClosedLoopConnection(request, load, started_s + seconds))
            opened.append(connection)
        await asyncio.wait_for(asyncio.gather(*(connection.closed for connection in opened)), seconds + 60)
    finally:
        for connection in opened:
            connection.transport.abort()
    load.seconds = time.perf_counter() - started_s
    return load


def drive(where: Where, request: bytes, connections: int, seconds: float) -> ClosedLoad:
    """Run `closed_loop` in its own event loop."""
    return _run(closed_loop(where, request, connections, seconds))


class Accepted(NamedTuple):
    """Answer with status 200: seconds from the start of the load, and from the moment its request was due."""

    arrived_s: float
    latency_s: float


@dataclass
class OpenLoad:
    """Results of an open loop: `sent` = accepted + refused + connection errors + unanswered.

    `timeout_s` is the deadline of a request, counted from the moment it was due; `seconds` is how long requests were
    sent; `refused` counts the answers other than 200 by status; `lateness_s` is the generator's own.
    """

    timeout_s: float
    seconds: float = 0.0
    sent: int = 0
    accepted: list[Accepted] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)
    connection_errors: int = 0
    unanswered: int = 0
    lateness_s: list[float] = field(default_factory=list)

    @property
    def in_time(self) -> int:
        """Number of answers with status 200 within the deadline."""
        return sum(answer.latency_s <= self.timeout_s for answer in self.accepted)

    @property
    def goodput_per_s(self) -> float:
        """Answers within the deadline a second, over the time in which requests were sent.

        Answers after that time do not count: they would credit an overloaded server with the work of `seconds` and of
        the time it took to empty its queue.
        """
        good = sum(answer.latency_s <= self.timeout_s and answer.arrived_s <= self.seconds for answer in self.accepted)
        return good / self.seconds if self.seconds else 0.0


class _OpenLoopConnection(_Connection):
    def __init__(self, loop: OpenLoop, due_s: float) -> None:
        super().__init__()
        self._loop = loop
        self.due_s: float | None = due_s
        self.idle_since_s = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._loop.connected(self)

    def answered(self, answer: WireAnswer) -> None:
        self._loop.answered(self, answer)

    def connection_lost(self, error: Exception | None) -> None:
        self._loop.lost(self)
        super().connection_lost(error)


class OpenLoop:
    """Sender of requests, each at the caller's call, on an idle connection or a new one; never waits for an answer."""

    def __init__(self, where: Where, request: bytes, timeout_s: float) -> None:
        self.load = OpenLoad(timeout_s)
        self.started_s = time.perf_counter()
        self._where = where
        self._request = request
        self._idle: list[_OpenLoopConnection] = []  # The connection used last is at the end, and goes first.
        self._connections: set[_OpenLoopConnection] = set()
        self._connecting: set[asyncio.Task[None]] = set()
        self._under_way = 0
        self._settled = asyncio.Event()
        self._settled.set()
        self._closing = False

    def send(self, due_s: float) -> None:
        """Send a request that was due at `due_s` (of `time.perf_counter`)."""
        self.load.sent += 1
        self._under_way += 1
        self._settled.clear()
        connection = self._idle.pop() if self._idle else None
        if connection and time.perf_counter() - connection.idle_since_s > _LONGEST_IDLE_S:
            # The rest has been idle for longer still.
            for stale in (connection, *self._idle):
                stale.transport.close()
            self._idle.clear()
            connection = None
        if connection:
            connection.due_s = due_s
            self._write(connection, due_s)
        else:
            task = asyncio.get_running_loop().create_task(self._connect(due_s))
            self._connecting.add(task)
            task.add_done_callback(self._connecting.discard)

    async def settled(self, limit_s: float) -> None:
        """Wait until no request is in flight, at most `limit_s`."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._settled.wait(), limit_s)

    async def close(self) -> None:
        """Close every connection; count requests without an answer as unanswered."""
        self._closing = True
        for task in self._connecting:
            task.cancel()
        await asyncio.gather(*self._connecting, return_exceptions=True)
        connections = tuple(self._connections)
        for connection in connections:
            connection.transport.abort()
        await asyncio.gather(*(connection.closed for connection in connections))
        self.load.unanswered += self._under_way
        self._under_way = 0

    async def _connect(self, due_s: float) -> None:
        try:
            await _connected(self._where, lambda: _OpenLoopConnection(self, due_s))
        except OSError:
            self.load.connection_errors += 1
            self._finish()

    def _write(self, connection: _OpenLoopConnection, due_s: float) -> None:
        self.load.lateness_s.append(time.perf_counter() - due_s)
        connection.transport.write(self._request)

    def _finish(self) -> None:
        self._under_way -= 1
        if not self._under_way:
            self._settled.set()

    def connected(self, connection: _OpenLoopConnection) -> None:
        """Send the first request of a new connection."""
        self._connections.add(connection)
        assert connection.due_s is not None
        self._write(connection, connection.due_s)

    def answered(self, connection: _OpenLoopConnection, answer: WireAnswer) -> None:
        """Count an answer; its connection is idle from now on."""
        now_s = time.perf_counter()
        if self._closing or connection.due_s is None:
            return
        if answer.status == "200":
            self.load.accepted.append(Accepted(now_s - self.started_s, now_s - connection.due_s))
        else:
            self.load.refused[answer.status] += 1
        connection.due_s = None
        if answer.keeps_alive:
            connection.idle_since_s = now_s
            self._idle.append(connection)
        else:
            connection.transport.close()
        self._finish()

    def lost(self, connection: _OpenLoopConnection) -> None:
        """Count a lost connection as an error if its request has no answer, unless we closed it."""
        self._connections.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)
        if connection.due_s is not None and not self._closing:
            connection.due_s = None
            self.load.connection_errors += 1
            self._finish()


async def open_loop(
    where: Where, request: bytes, due_s: Sequence[float], *, seconds: float, timeout_s: float, linger_s: float
) -> OpenLoad:
    """Send a request at each of `due_s` (ascending, from the start), then wait at most `linger_s` for answers."""
    loop = OpenLoop(where, request, timeout_s)
    loop.load.seconds = seconds
    try:
        for due in (*due_s, seconds):
            wait_s = loop.started_s + due - time.perf_counter()
            # Even when it is behind, the generator must go on reading answers.
            await asyncio.sleep(wait_s + _TIMER_STEP_S if wait_s > 0 else 0)
            if loop.load.sent < len(due_s):
                loop.send(loop.started_s + due)
        await loop.settled(linger_s)
    finally:
        await loop.close()
    return loop.load


def drive_open(
    where: Where, request: bytes, due_s: Sequence[float], *, seconds: float, timeout_s: float, linger_s: float = 3.0
) -> OpenLoad:
    """Run `open_loop` in its own event loop."""
    return _run(open_loop(where, request, due_s, seconds=seconds, timeout_s=timeout_s, linger_s=linger_s))


def poisson_arrivals(rate_per_s: float, seconds: float, seed: int) -> list[float]:
    """Draw the times of a Poisson process within `seconds`: independent arrivals, as of many users."""
    source = random.Random(seed)
    arrivals: list[float] = []
    at_s = source.expovariate(rate_per_s)
    while at_s < seconds:
        arrivals.append(at_s)
        at_s += source.expovariate(rate_per_s)
    return arrivals


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the value under which `percent` of the values stay; NaN if there are none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))] if ordered else float("nan")


def allow_many_connections() -> None:
    """Raise the limit on open files of this process and its children: unanswered requests keep theirs."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = 65_536 if hard == resource.RLIM_INFINITY else min(hard, 65_536)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


_C = TypeVar("_C", bound=_Connection)


async def _connected(where: Where, factory: Callable[[], _C]) -> _C:
    host, port, tls = where if isinstance(where, Address) else (HOST, where, None)
    _, connection = await asyncio.get_running_loop().create_connection(factory, host, port, ssl=tls)
    return connection


def _run(main: Coroutine[Any, Any, T]) -> T:
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main)
    return uvloop.run(main)
