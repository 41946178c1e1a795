"""The edge of the service around FastAPI: every answer gets its headers, every failure its body.

Owns: what is done around a route of FastAPI's; app.http.hot does the same around those that it answers. Nothing is
asked that app.access has not admitted. What is counted and traced is app.ingress.context's. Must not know what a
route does.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.access import audit
from app.access.access import KeyForbiddenError
from app.access.rules import Bind, Need, administered, check_spelling, need_of
from app.errors import ClientLeftError, ServiceError, internal_error
from app.http.answer import common_headers, error_content
from app.http.cors import Cors
from app.http.sending import PIECE_BYTES
from app.ingress.context import RequestContext, begin_request, end_request
from app.ingress.ingress import Ingress
from app.ingress.pacing import Pacing

log = logging.getLogger("anychip")

BIND = "anychip.bind"
"""In a scope: where the request came in; without it, the public port."""
_IN_A_TURN = 4
"""Requests that begin in one turn of the event loop: FastAPI takes some milliseconds for each."""
_AT_ONCE = ("/v2/health/", "/ping")


class Edge:
    """ASGI middleware outside of everything: every answer gets its headers, every failure the body in docs/api.md.

    Pure ASGI: starlette's BaseHTTPMiddleware costs more than a whole route.
    """

    def __init__(self, app: ASGIApp, ingress: Ingress) -> None:
        self._app = app
        self._link, self._access, self._bodies = ingress.link, ingress.access, ingress.bodies
        self._pacing = Pacing(_IN_A_TURN)
        self._cors = Cors(ingress.link.settings.origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; what is no HTTP request passes through."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if not scope["path"].startswith(_AT_ONCE):
            await self._pacing.take()
        scope["anychip"] = context = begin_request(self._link, scope)
        status, code = 0, "OK"
        need: Need = "infer"
        cors = self._cors.on and scope.get(BIND) != "admin"

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                context.hold(_length(message), self._bodies)
                status = message["status"]
                context.route = context.route or getattr(scope.get("route"), "path", "")
                message["headers"] = [*message["headers"], *common_headers(self._link, context, code)]
                if cors:
                    message["headers"] += self._cors.headers(scope["headers"])
            await _send_in_pieces(send, message)

        try:
            if cors and (said := self._cors.preflight(scope["method"], scope["headers"])) is not None:
                await send({"type": "http.response.start", "status": 204, "headers": said})
                await send({"type": "http.response.body"})
                status = 204
                return
            need = need_of(scope["method"], scope["path"])
            self._admit(need, scope, context)
            await self._app(scope, receive, answer)
        except (ClientLeftError, ClientDisconnect):
            code = "CANCELLED"
        except asyncio.CancelledError:
            code = "CANCELLED"
            raise
        except ServiceError as error:
            code = error.code
            await _send_error(answer, context, error)
        except Exception:
            code = "INTERNAL"
            log.exception("the request failed")
            if status:
                raise  # Too late for a body; the server cuts the connection, which the client can tell from an end.
            await _send_error(answer, context, internal_error())
        finally:
            end_request(self._link, scope, context, status, code)
            context.let_go()
            if need == "admin":
                self._record(scope, context, code)

    def _admit(self, need: Need, scope: Scope, context: RequestContext) -> None:
        """Raises NOT_FOUND, FORBIDDEN, UNAUTHORIZED."""
        check_spelling(scope.get("raw_path") or b"")
        bind: Bind = scope.get(BIND, "public")
        try:
            context.caller = self._access.admit(need, bind, scope["headers"], context.address)
        except KeyForbiddenError as error:
            context.caller = error.caller
            raise

    def _record(self, scope: Scope, context: RequestContext, code: str) -> None:
        action, subject = administered(scope["path"])
        audit.record(
            action,
            subject,
            key=context.caller.key,
            address=context.address,
            weights_sha256=context.weights_sha256,
            outcome=code,
            seconds=time.monotonic() - context.started_s,
        )


def _length(start: Message) -> int:
    """What an answer says of its size; 0 where it says nothing."""
    return int(dict(start["headers"]).get(b"content-length", 0))


async def _send_in_pieces(send: Callable[[Message], Any], message: Message) -> None:
    """Send on; what is large in pieces, each when the client has taken the one before."""
    body = message.get("body", b"")
    for start in range(0, len(body) - PIECE_BYTES, PIECE_BYTES):
        await send({"type": message["type"], "body": body[start : start + PIECE_BYTES], "more_body": True})
        await asyncio.sleep(0)
    if len(body) > PIECE_BYTES:
        message = {**message, "body": body[(len(body) - 1) // PIECE_BYTES * PIECE_BYTES :]}
    await send(message)


async def _send_error(send: Callable[[Message], Any], context: RequestContext, error: ServiceError) -> None:
    body, headers = error_content(error, context)
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
