"""The edge of the service: what every HTTP answer has in common.

Owns: request ids, timing and trace headers, error bodies, counting. Must not know what a route does.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from collections.abc import Callable, Iterable
from typing import Any

import orjson
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app import logs
from app.errors import ServiceError, error_body
from app.observability.metrics import MODELLESS
from app.protocols.context import RequestContext
from app.serving.service import Service

log = logging.getLogger("anychip")

_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,128}")


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
        scope["anychip"] = context = begun(self._service, scope)
        status, code = 0, "OK"

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                context.route = context.route or getattr(scope.get("route"), "path", "")
                if context.trace is not None:
                    context.trace.describe({**context.attributes(), "anychip.code": code})
                message["headers"] = [
                    *message["headers"],
                    (b"x-request-id", context.request_id.encode()),
                    (b"server-timing", context.timings.header().encode()),
                ]
                if context.traceparent:
                    message["headers"].append((b"traceparent", context.traceparent))
                if self._service.draining:
                    # The client's next request then comes on a new connection, to whoever listens by then.
                    message["headers"].append((b"connection", b"close"))
            await send(message)

        try:
            await self._app(scope, receive, answer)
        except ClientDisconnect:
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
            await _send_error(
                answer, context, ServiceError("INTERNAL", "something went wrong here; the log knows more")
            )
        finally:
            ended(self._service, scope, context, status, code)


def begun(service: Service, scope: Scope) -> RequestContext:
    """What is known of a request at its first byte. From here on the log lines of this task name it.

    Of the scope's entries `method`, `path` and `headers` matter: a gRPC call has them, too.
    """
    context = RequestContext(request_id(scope["headers"]), time.monotonic())
    tracing = service.tracing
    context.follow(scope["headers"], tracing.request(scope, context.started_s) if tracing else None)
    logs.request_id.set(context.request_id)
    logs.trace_id.set(context.exemplar["trace_id"] if context.exemplar else "")
    return context


def ended(service: Service, scope: Scope, context: RequestContext, status: int, code: str) -> None:
    """Count, trace and, where that is wanted, log the request. `status`: HTTP's, 0 where nobody was left to answer."""
    seconds = time.monotonic() - context.started_s
    if context.model:
        service.count(context.model, code, seconds, context.exemplar)
    elif code in MODELLESS:
        service.metrics.requests.labels("", code).inc()
    if context.trace is not None:
        context.trace.end(f"{scope['method']} {context.route}".rstrip(), status, code)
    if service.settings.log_requests:
        # Without the query: it is the client's, and may hold what nobody should read.
        fields = {"method": scope["method"], "path": scope["path"], "status": status, "code": code}
        fields |= {"ms": round(seconds * 1e3, 3)}
        log.info("request", extra={"fields": fields})


def request_id(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """The client's, where it sends one that can be trusted, else a new one."""
    given = next((value for name, value in headers if name == b"x-request-id"), b"")
    return given.decode() if _REQUEST_ID.fullmatch(given) else secrets.token_hex(8)


async def _send_error(send: Callable[[Message], Any], context: RequestContext, error: ServiceError) -> None:
    body = orjson.dumps(error_body(error.code, error.message, context.request_id))
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body)), *error.headers]
    if error.retry_after_s is not None:
        headers.append((b"retry-after", b"%d" % error.retry_after_s))
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
