"""HTTP load on a server, over keep-alive connections: in closed loop (`drive`) and in open loop (`drive_open`).

On two cores the generator must not be the bottleneck; where it is, the lateness of its requests shows it.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import resource
import ssl
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")
Call = Callable[[], Awaitable[str]]
"""Request and its answer: returns the status. Raises OSError or EOFError if no whole answer came."""
GOOD = "200"
"""Status of a good answer."""

HOST = "127.0.0.1"
# uvloop's timers count whole milliseconds: without this, a short sleep returns at once and spins on the server's core.
_TIMER_STEP_S = 0.001
# uvicorn closes a connection after 5 idle seconds; a request sent at that moment would be lost.
_LONGEST_IDLE_S = 3.0
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)")


class Address(NamedTuple):
    """Address of a server; HTTPS if `tls` is set."""

    host: str
    port: int
    tls: ssl.SSLContext | None = None


Where = int | Address
"""Address of a server; a number is a port of this machine."""


class _Connection(NamedTuple):
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    idle_since_s: float


class HttpClient:
    """Sender of one request, again and again, each time on an idle connection or a new one."""

    def __init__(self, where: Where, request: bytes) -> None:
        self._where = where if isinstance(where, Address) else Address(HOST, where)
        self._request = request
        self._idle: list[_Connection] = []  # The connection used last is at the end, and goes first.

    async def connect(self, connections: int) -> None:
        """Open so many connections. Raises OSError."""
        for _ in range(connections):
            self._idle.append(await self._connected())

    async def call(self) -> str:
        """Send the request and return the answer's status. Raises OSError, EOFError."""
        connection = self._idle.pop() if self._idle else None
        if connection is not None and time.perf_counter() - connection.idle_since_s > _LONGEST_IDLE_S:
            self._idle.append(connection)
            self.close()  # The rest has been idle for longer still.
            connection = None
        reader, writer, _ = connection or await self._connected()
        keeps_alive = False
        try:
            writer.write(self._request)
            status, keeps_alive = await read_answer(reader)
        finally:
            if keeps_alive:
                self._idle.append(_Connection(reader, writer, time.perf_counter()))
            else:
                writer.transport.abort()
        return status

    def close(self) -> None:
        """Close the idle connections."""
        for connection in self._idle:
            connection.writer.transport.abort()
        self._idle.clear()

    async def _connected(self) -> _Connection:
        host, port, tls = self._where
        return _Connection(*await asyncio.open_connection(host, port, ssl=tls), time.perf_counter())


async def read_answer(reader: asyncio.StreamReader) -> tuple[str, bool]:
    """Return an answer's status, and whether its connection may carry another request.

    Needs Content-Length or chunks: an answer without either cannot be told from one that was cut off. Raises EOFError
    for both.
    """
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    if length := _LENGTH.search(head):
        await reader.readexactly(int(length[1]))
    elif b"\r\ntransfer-encoding: chunked" in head:
        while size := int((await reader.readuntil(b"\r\n")).partition(b";")[0], 16):
            await reader.readexactly(size + 2)
        while await reader.readuntil(b"\r\n") != b"\r\n":  # Trailers.
            pass
    else:
        raise EOFError("the answer says no length")
    return head[9:12].decode(), b"\r\nconnection: close" not in head


def request_bytes(
    path: str, body: bytes, content_type: str, headers: Mapping[str, str] | None = None, host: str = "localhost"
) -> bytes:
    """Build a whole HTTP/1.1 POST request."""
    fields = {"Host": host, "Content-Type": content_type, "Content-Length": str(len(body)), **(headers or {})}
    lines = (f"POST {path} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items()))
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


@dataclass
class ClosedLoad:
    """Results of a closed loop. Latencies in seconds, of good answers; `errors` by status or exception."""

    seconds: float = 0.0
    latencies_s: list[float] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)

    @property
    def answers_per_s(self) -> float:
        """Good answers a second."""
        return len(self.latencies_s) / self.seconds if self.seconds else 0.0

    def percentile_ms(self, percent: float) -> float:
        """Return the latency in milliseconds under which `percent` of the answers stayed."""
        return percentile(self.latencies_s, percent) * 1e3


async def closed_loop(call: Call, connections: int, seconds: float) -> ClosedLoad:
    """Keep so many calls in flight for `seconds`; return when each has its last answer. One that is cut off ends."""
    load, started_s = ClosedLoad(), time.perf_counter()

    async def one() -> None:
        now_s = time.perf_counter()
        while now_s < started_s + seconds:
            begun_s = now_s
            try:
                status = await call()
            except (OSError, EOFError) as error:
                load.errors[type(error).__name__ if isinstance(error, OSError) else "closed"] += 1
                return
            now_s = time.perf_counter()
            if status == GOOD:
                load.latencies_s.append(now_s - begun_s)
            else:
                load.errors[status] += 1

    calling = [asyncio.create_task(one()) for _ in range(connections)]
    try:
        # If Ctrl-C cancels `gather`, asyncio prints a traceback.
        done, left = await asyncio.wait(calling, timeout=seconds + 60)
    finally:
        for each in calling:
            each.cancel()
    if left:
        raise TimeoutError("the last answers did not come within a minute")
    for each in done:
        each.result()
    load.seconds = time.perf_counter() - started_s
    return load


def drive(where: Where, request: bytes, connections: int, seconds: float) -> ClosedLoad:
    """Load a server by a closed loop, in its own event loop. Raises OSError if it cannot be reached."""

    async def main() -> ClosedLoad:
        with contextlib.closing(HttpClient(where, request)) as client:
            await client.connect(connections)
            return await closed_loop(client.call, connections, seconds)

    return _run(main())


class Accepted(NamedTuple):
    """Good answer: seconds from the start of the load, and from the moment its request was due."""

    arrived_s: float
    latency_s: float


@dataclass
class OpenLoad:
    """Results of an open loop: `sent` = accepted + refused + connection errors + unanswered.

    `timeout_s` is the deadline of a request, counted from the moment it was due; `seconds` is how long requests were
    sent; `refused` counts the other answers by status; `lateness_s` is the generator's own.
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
    def goodput_per_s(self) -> float:
        """Answers within the deadline a second, over the time in which requests were sent.

        Answers after that time do not count: they would credit an overloaded server with the work of `seconds` and of
        the time it took to empty its queue.
        """
        good = sum(answer.latency_s <= self.timeout_s and answer.arrived_s <= self.seconds for answer in self.accepted)
        return good / self.seconds if self.seconds else 0.0


async def open_loop(
    call: Call, due_s: Sequence[float], *, seconds: float, timeout_s: float, linger_s: float
) -> OpenLoad:
    """Call at each of `due_s` (ascending, from the start), then wait at most `linger_s` for answers."""
    load, started_s = OpenLoad(timeout_s, seconds), time.perf_counter()
    tasks: list[asyncio.Task[None]] = []

    async def one(due: float) -> None:
        load.lateness_s.append(time.perf_counter() - started_s - due)
        try:
            status = await call()
        except (OSError, EOFError):
            load.connection_errors += 1
            return
        now_s = time.perf_counter() - started_s
        if status == GOOD:
            load.accepted.append(Accepted(now_s, now_s - due))
        else:
            load.refused[status] += 1

    for due in (*due_s, seconds):
        wait_s = started_s + due - time.perf_counter()
        # Even when it is behind, the generator must go on reading answers.
        await asyncio.sleep(wait_s + _TIMER_STEP_S if wait_s > 0 else 0)
        if load.sent < len(due_s):
            load.sent += 1
            tasks.append(asyncio.create_task(one(due)))
    if tasks:
        _, left = await asyncio.wait(tasks, timeout=linger_s)
        load.unanswered = len(left)
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
    return load


def drive_open(
    where: Where, request: bytes, due_s: Sequence[float], *, seconds: float, timeout_s: float, linger_s: float = 3.0
) -> OpenLoad:
    """Load a server by an open loop, in its own event loop."""

    async def main() -> OpenLoad:
        with contextlib.closing(HttpClient(where, request)) as client:
            return await open_loop(client.call, due_s, seconds=seconds, timeout_s=timeout_s, linger_s=linger_s)

    return _run(main())


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


def _run(main: Coroutine[Any, Any, T]) -> T:
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main)
    return uvloop.run(main)
