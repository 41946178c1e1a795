"""Clients for the tests of a running service: many at once, without a thread each, counted by outcome."""

from __future__ import annotations

import asyncio
import collections
import contextlib
from collections.abc import Callable
from typing import Any

import httpx

WAIT_S = 240


def client_at(
    url: str, address: str | None = None, *, connections: int | None = 1, timeout_s: float = WAIT_S
) -> httpx.AsyncClient:
    """Make a client at an address of this machine, by which the service tells clients apart.

    It never closes an idle connection: httpcore 1.0 may close one that it has just given to a request, if this process
    was busy in between.
    """
    limits = httpx.Limits(max_connections=connections, keepalive_expiry=None)
    transport = httpx.AsyncHTTPTransport(limits=limits, local_address=address, trust_env=False, verify=False)
    return httpx.AsyncClient(base_url=url, timeout=timeout_s, transport=transport, trust_env=False)


class Load:
    """Clients in a loop of requests, from `start` until `stop`; `outcomes` by (status, code)."""

    def __init__(self, url: str, path: str, body: bytes, clients: int, headers: dict[str, str] | None = None) -> None:
        self.outcomes: collections.Counter[tuple[int, str]] = collections.Counter()
        # A pool for each: one pool looks at all its connections for every request.
        self._clients = [client_at(url) for _ in range(clients)]
        self._request: dict[str, Any] = {
            "url": path,
            "content": body,
            "headers": {"Content-Type": "image/jpeg", **(headers or {})},
        }
        self._stopping = False
        self._answered = asyncio.Condition()

    async def __aenter__(self) -> Load:
        self._tasks = [asyncio.create_task(self._ask_on(client)) for client in self._clients]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stopping = True
        try:
            await asyncio.wait_for(asyncio.gather(*self._tasks), WAIT_S)
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await asyncio.gather(*(client.aclose() for client in self._clients))

    async def answers(self, more: int) -> None:
        wanted = self.outcomes.total() + more
        async with self._answered:
            await asyncio.wait_for(self._answered.wait_for(lambda: self.outcomes.total() >= wanted), WAIT_S)

    async def _ask_on(self, client: httpx.AsyncClient) -> None:
        while not self._stopping:
            try:
                answer = await client.post(**self._request)
                outcome = answer.status_code, answer.json().get("code", "OK")
            except httpx.ConnectError:
                outcome = 0, "REFUSED"
                self._stopping = True  # Nobody listens any more.
            except httpx.HTTPError as error:
                outcome = 0, type(error).__name__
            async with self._answered:
                self.outcomes[outcome] += 1
                self._answered.notify_all()


async def until(condition: Callable[[], object], *, blocks: bool = True) -> None:
    """Poll for a state that nothing signals, more and more rarely. `blocks`: the condition blocks, like a request.

    Such a condition runs in a thread, so it must not change what the event loop changes too.
    """
    waited_s, pause_s = 0.0, 0.001
    while waited_s < WAIT_S:
        with contextlib.suppress(httpx.TransportError):
            if await asyncio.to_thread(condition) if blocks else condition():
                return
        await asyncio.sleep(pause_s)
        waited_s, pause_s = waited_s + pause_s, min(1.5 * pause_s, 0.05)
    raise AssertionError("it never came about")
