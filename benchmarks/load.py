"""A closed-loop HTTP load generator: so many connections, each sends its next request when the last is answered.

Owns: keep-alive connections and their latencies. Small on purpose: on two cores the generator must not be the
bottleneck.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field


@dataclass
class Load:
    """What a run saw. Latencies in seconds, of answers with status 200; `errors` by status or exception."""

    seconds: float = 0.0
    latencies_s: list[float] = field(default_factory=list)
    errors: dict[str, int] = field(default_factory=dict)

    @property
    def answers_per_s(self) -> float:
        """Good answers a second."""
        return len(self.latencies_s) / self.seconds if self.seconds else 0.0

    def percentile_ms(self, percent: float) -> float:
        """The latency that `percent` of the answers stayed under, in milliseconds."""
        ordered = sorted(self.latencies_s)
        return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))] * 1e3 if ordered else float("nan")


class _Client(asyncio.Protocol):
    def __init__(self, request: bytes, load: Load, deadline_s: float) -> None:
        self._request = request
        self._load = load
        self._deadline_s = deadline_s
        self._received = b""
        self._body_left = -1
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: asyncio.Transport = transport  # type: ignore[assignment]
        self._send()

    def _send(self) -> None:
        self._started_s = time.perf_counter()
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, separator, body = self._received.partition(b"\r\n\r\n")
        if not separator:
            return
        lowered = head.lower()
        start = lowered.index(b"content-length:") + 15
        length = int(lowered[start:].split(b"\r\n", 1)[0])
        if len(body) < length:
            return
        self._received = body[length:]
        now_s = time.perf_counter()
        status = head[9:12].decode()
        if status == "200":
            self._load.latencies_s.append(now_s - self._started_s)
        else:
            self._load.errors[status] = self._load.errors.get(status, 0) + 1
        if now_s >= self._deadline_s:
            self._transport.close()
        else:
            self._send()

    def connection_lost(self, error: Exception | None) -> None:
        if error is not None:
            name = type(error).__name__
            self._load.errors[name] = self._load.errors.get(name, 0) + 1
        if not self.closed.done():
            self.closed.set_result(None)


def request_bytes(path: str, body: bytes, content_type: str) -> bytes:
    """A whole HTTP/1.1 POST request."""
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}"
    return head.encode() + b"\r\n\r\n" + body


async def _drive(port: int, request: bytes, connections: int, seconds: float) -> Load:
    loop = asyncio.get_running_loop()
    load = Load()
    started_s = time.perf_counter()
    deadline_s = started_s + seconds
    clients = [
        (await loop.create_connection(lambda: _Client(request, load, deadline_s), "127.0.0.1", port))[1]
        for _ in range(connections)
    ]
    await asyncio.wait_for(asyncio.gather(*(client.closed for client in clients)), seconds + 60)
    load.seconds = time.perf_counter() - started_s
    return load


def drive(port: int, request: bytes, connections: int, seconds: float) -> Load:
    """Load a server on this machine for `seconds`; ends when every connection has its last answer."""
    return asyncio.run(_drive(port, request, connections, seconds))
