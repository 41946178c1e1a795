"""The edge of the service around FastAPI: every answer gets its headers, every failure its body; CORS.

app.http.hot does the same around its own routes. A request reaches a route only if app.access has admitted it: CORS
(the Fetch standard) decides nothing, as a page sends a key like every client, and cookies are never asked for.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import orjson
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.access.rules import LIVE, READY, need_of
from app.errors import ERRORS, ClientLeftError, ServiceError, error_body
from app.http.call import Header, common_headers, error_content
from app.ingress.context import UNCOUNTED_BYTES, RequestContext
from app.ingress.ingress import Ingress
from app.ingress.sending import PIECE_BYTES

BIND = "anychip.bind"
"""Key in a scope of the port that the request came in by; without it, the public port."""
_IN_A_TURN = 4
"""Requests that begin in one turn of the event loop: FastAPI takes some milliseconds for each."""
_AT_ONCE = frozenset((*LIVE, *READY, "/ping"))
_ASKED_FIRST = b"access-control-request-method"
_METHODS = b"GET, POST, PUT"
_SENT = (
    b"authorization, content-type, inference-header-content-length, traceparent, x-api-key, x-priority, x-request-id, "
    b"x-timeout-ms"
)
_SHOWN = b"inference-header-content-length, retry-after, server-timing, traceparent, x-request-id"
_REMEMBERED_S = b"600"


class Cors:
    """CORS for these origins, such as `https://app.example.com`; `*`: every one."""

    def __init__(self, origins: Iterable[str]) -> None:
        self._origins = frozenset(origin.rstrip("/").lower().encode() for origin in origins)
        self.on = bool(self._origins)

    def headers(self, asked: Iterable[Header]) -> list[Header]:
        """Return the CORS headers of the answer to these request headers; only `vary` for a page not named."""
        origin = next((value for name, value in asked if name == b"origin"), b"")
        vary = (b"vary", b"origin")
        if not origin or not (b"*" in self._origins or origin.lower() in self._origins):
            return [vary]
        return [vary, (b"access-control-allow-origin", origin), (b"access-control-expose-headers", _SHOWN)]

    def preflight(self, method: str, asked: list[Header]) -> list[Header] | None:
        """Return the headers of the answer to a preflight request; None if the request is none."""
        if method != "OPTIONS" or not any(name == _ASKED_FIRST for name, _ in asked):
            return None
        given = self.headers(asked)
        if len(given) > 1:
            given += [
                (b"access-control-allow-methods", _METHODS),
                (b"access-control-allow-headers", _SENT),
                (b"access-control-max-age", _REMEMBERED_S),
            ]
        return given


class Pacing:
    """Pacing: so many requests begin in one turn of the event loop, the others in the next ones, in their order.

    Else a flood of requests of a few milliseconds each would run in one turn, and all others would wait for it.
    """

    def __init__(self, most: int) -> None:
        self._most = self._left = most
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._renewing = False

    async def take(self) -> None:
        """Wait for the caller's turn; return at once if fewer came before it in this turn of the loop."""
        if self._left and not self._waiting:
            self._left -= 1
            self._renew_soon()
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        self._renew_soon()
        await turn

    def _renew_soon(self) -> None:
        if not self._renewing:
            self._renewing = True
            asyncio.get_running_loop().call_soon(self._renew)

    def _renew(self) -> None:
        self._renewing = False
        self._left = self._most
        while self._waiting and self._left:
            turn = self._waiting.popleft()
            if not turn.done():  # Else the request has left.
                turn.set_result(None)
                self._left -= 1
        if self._left < self._most:
            self._renew_soon()


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
        """Serve one request; pass on what is no HTTP request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if scope["path"] not in _AT_ONCE:
            await self._pacing.take()
        cors = self._cors.on and scope.get(BIND) != "admin"
        with RequestContext(self._link, scope) as context:
            only_head = scope["method"] == "HEAD"
            routed = {**scope, "method": "GET"} if only_head else scope
            answered = asyncio.Event()
            received = _left_once(answered) if only_head else receive

            async def answer(message: Message) -> None:
                if message["type"] == "http.response.start":
                    if (size := int(dict(message["headers"]).get(b"content-length", 0))) > UNCOUNTED_BYTES:
                        context.hold(size, self._bodies)
                    context.status = message["status"]
                    answered.set()
                    context.route = context.route or getattr(routed.get("route"), "path", "")
                    message["headers"] = [*message["headers"], *common_headers(self._link, context)]
                    if cors:
                        message["headers"] += self._cors.headers(scope["headers"])
                elif only_head:
                    return
                await _send_in_pieces(send, message)

            try:
                if scope["method"] == "TRACE":
                    raise ServiceError("METHOD_NOT_ALLOWED", "TRACE is not allowed here")
                if cors and (preflight := self._cors.preflight(scope["method"], scope["headers"])) is not None:
                    context.status = 204
                    await send({"type": "http.response.start", "status": 204, "headers": preflight})
                    await send({"type": "http.response.body"})
                    return
                need = need_of(routed["method"], scope["path"])
                context.admit(self._access, need, scope.get(BIND, "public"))
                await self._app(routed, received, answer)
            except ClientDisconnect:
                raise ClientLeftError from None
            except Exception as error:
                failure = context.failure(error)
                if context.status:
                    raise  # Too late for a body; the server cuts the connection, so that the client sees no proper end.
                body, headers = error_content(failure, context)
                await answer({"type": "http.response.start", "status": failure.status, "headers": headers})
                await answer({"type": "http.response.body", "body": body})
            if only_head:
                await send({"type": "http.response.body"})


def _left_once(answered: asyncio.Event) -> Receive:
    """Receive for a HEAD: no body; a stream without an end finds its client gone once the head is there."""
    messages = iter([{"type": "http.request"}])

    async def receive() -> Message:
        if (message := next(messages, None)) is not None:
            return message
        await answered.wait()
        return {"type": "http.disconnect"}

    return receive


async def _send_in_pieces(send: Callable[[Message], Any], message: Message) -> None:
    body = message.get("body", b"")
    for start in range(0, len(body) - PIECE_BYTES, PIECE_BYTES):
        await send({"type": message["type"], "body": body[start : start + PIECE_BYTES], "more_body": True})
        await asyncio.sleep(0)
    if len(body) > PIECE_BYTES:
        message = {**message, "body": body[(len(body) - 1) // PIECE_BYTES * PIECE_BYTES :]}
    await send(message)


def opening_app(progress: Callable[[], str]) -> ASGIApp:
    """Return the application of a port before there is a service: NOT_READY and the reason; liveness probes get 200."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        request_id = secrets.token_hex(8)
        headers = {"x-request-id": request_id, "connection": "close"}
        status = 200
        document: dict[str, Any] = {"live": True}
        if scope["path"] not in LIVE:
            status, document = ERRORS["NOT_READY"].status, error_body("NOT_READY", progress(), request_id)
            headers["retry-after"] = "1"
        await Response(orjson.dumps(document), status, headers, "application/json")(scope, receive, send)

    return answer
