"""The edge of the service: what every HTTP answer has in common.

Owns: the headers every answer has, and the body of every error. What is counted and traced is app.protocols.context's.
Must not know what a route does.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import orjson
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.errors import ClientLeftError, ServiceError, error_body, internal_error
from app.protocols.context import RequestContext, begin_request, end_request
from app.serving.service import Service

log = logging.getLogger("anychip")


class Edge:
    """ASGI middleware outside of everything: every answer gets its headers, every failure the body in docs/api.md.

    Pure ASGI: starlette's BaseHTTPMiddleware costs more than a whole route.
    """

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; what is no HTTP request passes through."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope["anychip"] = context = begin_request(self._service, scope)
        status, code = 0, "OK"

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                context.route = context.route or getattr(scope.get("route"), "path", "")
                if context.recorder.trace is not None:
                    context.recorder.trace.describe({**context.attributes(), "anychip.code": code})
                message["headers"] = [
                    *message["headers"],
                    (b"x-request-id", context.request_id.encode()),
                    (b"server-timing", context.recorder.timings.header().encode()),
                ]
                if context.traceparent:
                    message["headers"].append((b"traceparent", context.traceparent))
                if self._service.readiness.draining:
                    # The client's next request then comes on a new connection, to whoever listens by then.
                    message["headers"].append((b"connection", b"close"))
            await send(message)

        try:
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
            end_request(self._service, scope, context, status, code)


async def _send_error(send: Callable[[Message], Any], context: RequestContext, error: ServiceError) -> None:
    body = orjson.dumps(error_body(error.code, error.message, context.request_id))
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body)), *error.headers]
    if error.retry_after_s is not None:
        headers.append((b"retry-after", b"%d" % error.retry_after_s))
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
