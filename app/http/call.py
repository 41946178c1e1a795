"""A request for a model as HTTP sees it: terms in headers, a body that arrives in pieces, a client that may leave.

Owns: what all such requests have in common. What is in the body is the routes' business.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from starlette.types import Receive, Scope

from app.config import Settings
from app.http.body import Fields, header_number, read_body
from app.http.interrupt import unless_disconnected
from app.protocols.budget import Share
from app.protocols.ingress import Call
from app.protocols.interrupt import interrupted_at
from app.protocols.parameters import deadline_s
from app.serving.terms import Terms

Answer = TypeVar("Answer")


class HttpCall(Call[Answer]):
    """`body` is there once `read` has ended."""

    def __init__(self, scope: Scope, receive: Receive, model: str, version: str = "") -> None:
        super().__init__(scope["anychip"], model, version)
        self.scope, self.receive = scope, receive
        self.headers: Fields = dict(scope["headers"])
        self.body = b""
        self._max_body_bytes = self._least_bytes_per_s = 0

    def terms(self, settings: Settings) -> Terms:  # noqa: D102
        self._max_body_bytes = settings.max_body_bytes
        self._least_bytes_per_s = settings.min_upload_bytes_per_s
        timeout_ms = header_number(self.headers, "X-Timeout-Ms", settings.timeout_ms, 1e-3, 1e9)
        priority = int(header_number(self.headers, "X-Priority", 0, -100, 100))
        recorder = self.context.recorder
        return Terms(deadline_s(settings, self.context.started_s, timeout_ms / 1e3), priority, recorder)

    async def read(self, share: Share, limit: interrupted_at) -> None:  # noqa: D102
        limit.least_bytes_per_s = self._least_bytes_per_s
        self.body = await read_body(self.receive, self.headers, self._max_body_bytes, share, limit)

    async def watched(self, running: Awaitable[Answer], on_leave: Callable[[], None]) -> Answer:  # noqa: D102
        return await unless_disconnected(self.receive, running, on_leave)
