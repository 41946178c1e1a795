"""`GET /v1/stats/stream`: the answer of `/v1/stats`, sent again and again as server-sent events.

Owns: how many may listen, and that the numbers are collected once for all of them. Must not collect in the event loop:
that takes milliseconds, so a thread does it, and only while somebody listens.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import orjson
from fastapi import APIRouter, Request, Response
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from app.errors import ServiceError
from app.http.edge import BIND
from app.ingress.budget import Budget
from app.serving.service import Service
from app.serving.snapshot import snapshot

INTERVAL_S = 0.5
MAX_LISTENERS = 16

router = APIRouter(tags=["status"])


class StatsFeed:
    """The numbers of a service, collected twice a second for everybody who listens. Belongs to one event loop."""

    def __init__(self, service: Service, interval_s: float = INTERVAL_S) -> None:
        self._service = service
        self._interval_s = interval_s
        self._next: asyncio.Task[bytes] | None = None
        self._collected_s = 0.0
        self.listeners = Budget(MAX_LISTENERS, "listeners to the numbers")
        """Who listens takes one, under the caller's name."""

    async def events(self, admitted: Callable[[], bool]) -> AsyncIterator[bytes]:
        """Server-sent events, each with the JSON of `/v1/stats`. A slow listener misses some and is never behind.

        Ends when the service shuts down, or the listener is not `admitted` any more: its key was taken back.
        """
        yield b"retry: 2000\n\n"
        while not self._service.readiness.draining:
            text = await asyncio.shield(self._following())
            if not admitted():
                break
            yield b"event: stats\ndata: " + text + b"\n\n"

    def _following(self) -> asyncio.Task[bytes]:
        """What is collected next, for everybody who waits for it."""
        if self._next is None:
            self._next = asyncio.create_task(self._collect(), name="stats-feed")
        return self._next

    async def _collect(self) -> bytes:
        loop = asyncio.get_running_loop()
        try:
            await asyncio.sleep(max(0.0, self._collected_s + self._interval_s - loop.time()))
            self._collected_s = loop.time()
            return await asyncio.to_thread(_collected_json, self._service)
        finally:
            self._next = None


def _collected_json(service: Service) -> bytes:
    return orjson.dumps(snapshot(service).model_dump())


class _EventStream(StreamingResponse):
    """A stream that leaves its feed however it ends, also when not one event was sent."""

    def __init__(self, feed: StatsFeed, caller: str, admitted: Callable[[], bool]) -> None:
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        super().__init__(feed.events(admitted), media_type="text/event-stream", headers=headers)
        self._feed, self._caller = feed, caller

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._feed.listeners.give(self._caller, 1)


@router.get("/v1/stats/stream", response_class=Response, responses={404: {"description": "Nothing is counted here"}})
async def stats_stream(request: Request) -> Response:
    """The answer of `/v1/stats` twice a second, as server-sent events of the name `stats`."""
    state = request.app.state
    if not state.service.metrics.enabled:
        raise ServiceError("NOT_FOUND", "nothing is counted here: the service was started with --metrics false")
    feed: StatsFeed = state.stats_feed
    access, scope = state.ingress.access, request.scope

    def admitted() -> bool:
        try:
            access.admit("infer", scope.get(BIND, "public"), scope["headers"], scope["anychip"].address)
        except ServiceError:
            return False
        return True

    caller = scope["anychip"].caller.name
    feed.listeners.take(caller, 1)
    return _EventStream(feed, caller, admitted)
