"""A request for a model as HTTP sees it: terms in headers, a body that arrives in pieces, a client that may leave.

Owns: what all such requests have in common, whichever server has read their head. What is in the body is the routes'
business.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from typing import TypeVar

from starlette.requests import Request
from starlette.types import Receive, Scope

from app.config import Settings
from app.errors import ClientLeftError, ServiceError
from app.http.body import Body, Fields, inflated
from app.ingress.budget import Lease
from app.ingress.ingress import Call, Ingress, Run
from app.ingress.interrupt import Interruption, interrupted_at
from app.link import ServedModel, Terms
from app.protocols.options import X_PRIORITY, X_TIMEOUT_MS
from app.protocols.parameters import deadline_s, read_header

_LEAST_UPLOAD_BYTES_PER_S = 4096
"""After an upload's first five seconds; slower ones are refused."""

Answer = TypeVar("Answer")


class HttpRequest(ABC):
    """A request whose head is there. `scope` is ASGI's, with the request's context as `anychip`; `headers`: by name."""

    def __init__(self, scope: Scope, headers: Fields) -> None:
        self.scope, self.headers = scope, headers

    @abstractmethod
    async def body(self, max_bytes: int, lease: Lease, limit: interrupted_at) -> Body:
        """The whole body, its bytes taken of `lease` as they arrive, and `limit` told of them.

        Raises BODY_TOO_LARGE, QUEUE_FULL, ClientLeftError.
        """

    @abstractmethod
    async def watched(self, running: Awaitable[Answer], on_leave: Callable[[], None]) -> Answer:
        """The result of `running`; when the client leaves first, `on_leave` is called and `running` cancelled.

        Raises ClientLeftError then. The body must have been read.
        """


class AsgiRequest(HttpRequest):
    """One that came through an ASGI server."""

    def __init__(self, scope: Scope, receive: Receive) -> None:
        super().__init__(scope, dict(scope["headers"]))
        self._receive = receive

    @classmethod
    def of(cls, request: Request) -> AsgiRequest:
        """The same request, as the framework gives it."""
        return cls(request.scope, request.receive)

    async def body(self, max_bytes: int, lease: Lease, limit: interrupted_at) -> Body:  # noqa: D102
        declared = self.headers.get(b"content-length", b"")
        too_large = ServiceError("BODY_TOO_LARGE", f"the body is larger than the {max_bytes} bytes that are read here")
        if declared.isdigit() and int(declared) > max_bytes:
            raise too_large
        chunks: list[bytes] = []
        size, more = 0, True
        while more:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientLeftError
            more = message.get("more_body", False)
            chunk = message.get("body", b"")
            size += len(chunk)
            if size > max_bytes:
                raise too_large
            lease.take(len(chunk))
            chunks.append(chunk)
            if more and size:
                limit.arrived(size)
        if len(chunks) > 1:
            limit.arrived_wholly()
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    async def watched(self, running: Awaitable[Answer], on_leave: Callable[[], None]) -> Answer:  # noqa: D102
        # The body has been read: what is received now is taken for the end.
        with Interruption() as interruption:

            async def watch() -> None:
                while (await self._receive())["type"] != "http.disconnect":
                    pass
                on_leave()
                interruption.interrupt(ClientLeftError())

            watcher = asyncio.ensure_future(watch())
            try:
                return await running
            finally:
                # Nothing is awaited after this, so that a client who leaves now interrupts nothing else.
                watcher.cancel()


class HttpCall(Call[Answer]):
    """`body` is there once `read` has ended, without its Content-Encoding when `asked` is called."""

    def __init__(self, request: HttpRequest, model: str, version: str = "") -> None:
        super().__init__(request.scope["anychip"], model, version)
        self.request, self.headers = request, request.headers
        self.body: Body = b""
        self._max_body_bytes = 0

    def terms(self, settings: Settings) -> Terms:  # noqa: D102
        self._max_body_bytes = settings.max_body_bytes
        timeout_ms = read_header(X_TIMEOUT_MS, self.headers) or settings.timeout_ms
        priority = read_header(X_PRIORITY, self.headers)
        recorder = self.context.recorder
        return Terms(deadline_s(self.context.started_s, timeout_ms / 1e3), priority, recorder)

    async def read(self, lease: Lease, limit: interrupted_at) -> None:  # noqa: D102
        limit.least_bytes_per_s = _LEAST_UPLOAD_BYTES_PER_S
        self.body = await self.request.body(self._max_body_bytes, lease, limit)

    async def prepare(  # noqa: D102
        self, ingress: Ingress, served: ServedModel, terms: Terms, lease: Lease
    ) -> Run[Answer]:
        encoding = self.headers.get(b"content-encoding", b"").decode("latin-1").strip().lower()
        if encoding not in ("", "identity"):
            self.body = await ingress.offload(inflated, encoding, self.body, self._max_body_bytes)
            lease.take(len(self.body))
        return await self.asked(ingress, served, terms, lease)

    @abstractmethod
    async def asked(self, ingress: Ingress, served: ServedModel, terms: Terms, lease: Lease) -> Run[Answer]:
        """What the body asks of the model, as `prepare` says."""

    async def watched(self, running: Awaitable[Answer], on_leave: Callable[[], None]) -> Answer:  # noqa: D102
        return await self.request.watched(running, on_leave)
