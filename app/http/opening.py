"""Answer of a port before there is a service behind it: the process lives, and how far the start is.

Owns: that answer. Its connections end with it. Must not know models.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from app.access.rules import LIVE
from app.errors import ERRORS, error_body


class OpeningApp:
    """Application that answers every request with NOT_READY and the reason; only the liveness probe gets 200."""

    def __init__(self, said: Callable[[], str]) -> None:
        self._said = said

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        request_id = secrets.token_hex(8)
        headers = {"x-request-id": request_id, "connection": "close"}
        status, content = 200, orjson.dumps({"live": True})
        if scope["path"] not in LIVE:
            status, content = (
                ERRORS["NOT_READY"].status,
                orjson.dumps(error_body("NOT_READY", self._said(), request_id)),
            )
            headers["retry-after"] = "1"
        await Response(content, status, headers, "application/json")(scope, receive, send)
