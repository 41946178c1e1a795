"""The FastAPI application and the server around it: start, signals, drain, stop.

Owns: the middleware (request id, timing, error bodies, counting), the routes' assembly and the order of shutdown. Must
not know how images become predictions.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import secrets
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any

import orjson
import uvicorn
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.config import Settings
from app.context import RequestContext
from app.docs_page import mount_docs
from app.errors import Code, ServiceError, error_body
from app.routes import predict, repository, status
from app.routes.body import BodyBudget
from app.service import Service
from app.workers import WorkerStartError
from models import Model

log = logging.getLogger("anychip")

_CODES: dict[int, Code] = {404: "NOT_FOUND", 405: "METHOD_NOT_ALLOWED", 413: "BODY_TOO_LARGE"}
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,128}")


class Edge:
    """ASGI middleware outside of everything: every answer gets its headers, every failure API.md's body.

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
        context = RequestContext(_request_id(scope), time.monotonic())
        scope["anychip"] = context
        started = False

        async def answer(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                message["headers"] = [
                    *message["headers"],
                    (b"x-request-id", context.request_id.encode()),
                    (b"server-timing", context.server_timing().encode()),
                ]
            await send(message)

        code = "OK"
        try:
            await self._app(scope, receive, answer)
        except ClientDisconnect:
            code = "CANCELLED"
        except ServiceError as error:
            code = error.code
            await _send_error(answer, context, error)
        except Exception:
            code = "INTERNAL"
            log.exception("request %s failed", context.request_id)
            if started:
                raise  # Too late for a body; the server cuts the connection, which the client can tell from an end.
            await _send_error(
                answer, context, ServiceError("INTERNAL", "something went wrong here; the log knows more")
            )
        if context.model:
            self._service.count(context.model, code, time.monotonic() - context.started_s)


def _request_id(scope: Scope) -> str:
    given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
    return given.decode() if _REQUEST_ID.fullmatch(given) else secrets.token_hex(8)


async def _send_error(send: Callable[[Message], Any], context: RequestContext, error: ServiceError) -> None:
    body = orjson.dumps(error_body(error.code, error.message, context.request_id))
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body)), *error.headers]
    if error.retry_after_s is not None:
        headers.append((b"retry-after", b"%d" % error.retry_after_s))
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


# Handlers sit inside the middleware, which alone knows the request id: they translate and raise on.
async def _framework_error(request: Any, error: Any) -> Any:
    code = _CODES.get(error.status_code, "INVALID_REQUEST" if error.status_code < 500 else "INTERNAL")
    if code == "NOT_FOUND":
        message = f"there is nothing at {request.url.path}; /docs lists what there is"
    elif code == "METHOD_NOT_ALLOWED":
        message = f"{request.method} is not allowed at {request.url.path}"
    else:
        message = str(error.detail)
    headers = [(name.lower().encode(), value.encode()) for name, value in (error.headers or {}).items()]
    raise ServiceError(code, message, headers=headers) from None


async def _validation_error(_request: Any, error: Any) -> Any:
    first = error.errors()[0]
    raise ServiceError("INVALID_REQUEST", f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None


def create_app(service: Service) -> FastAPI:
    """The application over a service that somebody else starts and stops."""
    app = FastAPI(
        title="anychip",
        summary="Classifies and detects in images, on any accelerator PyTorch reaches",
        docs_url=None,
        redoc_url=None,
    )
    app.state.service = service
    app.state.bodies = BodyBudget(service.settings.max_buffered_bytes)
    app.add_exception_handler(HTTPException, _framework_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.include_router(predict.router)
    app.include_router(status.router)
    app.include_router(repository.router)
    mount_docs(app)
    app.add_middleware(Edge, service=service)
    return app


class Server(uvicorn.Server):
    """uvicorn, without its signal handling: the order of shutdown is ours."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to `serve`."""
        yield


async def serve(settings: Settings, models: Sequence[Model], on_ready: Callable[[str], None] | None = None) -> None:
    """Serve until SIGTERM or SIGINT, then drain. `on_ready` hears the address once every model answers.

    Raises WorkerStartError when a worker cannot start, OSError when the port is taken.
    """
    loop = asyncio.get_running_loop()
    service = Service(settings, models)
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    try:
        async with _listening(create_app(service), settings) as server:
            address = f"http://{settings.host}:{server.servers[0].sockets[0].getsockname()[1]}"
            stopping = asyncio.create_task(stop.wait())
            starting = asyncio.create_task(service.start())
            try:
                await asyncio.wait((starting, stopping), return_when=asyncio.FIRST_COMPLETED)
                if starting.done():
                    await starting
                    log.info("ready at %s", address)
                    if on_ready is not None:
                        on_ready(address)
                    await stopping
            finally:
                stopping.cancel()
                starting.cancel()
                await asyncio.gather(starting, stopping, return_exceptions=True)
            stop.clear()
            await _drain(service, settings, stop)
    finally:
        await service.stop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


async def _drain(service: Service, settings: Settings, hurry: asyncio.Event) -> None:
    """Readiness off, serve on for the grace period, refuse, finish what was accepted. A second signal cuts it short."""
    service.draining = True
    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(hurry.wait(), settings.grace_s)
    service.refusing = True
    with contextlib.suppress(asyncio.TimeoutError):
        hurried, drained = asyncio.ensure_future(hurry.wait()), asyncio.ensure_future(service.drained())
        try:
            await asyncio.wait((hurried, drained), timeout=settings.drain_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            hurried.cancel()
            drained.cancel()
            await asyncio.gather(hurried, drained, return_exceptions=True)
    cut = service.images_under_way()
    if cut:
        log.warning("%d images were cut off by the shutdown", cut)


@contextlib.asynccontextmanager
async def _listening(app: FastAPI, settings: Settings) -> AsyncIterator[Server]:
    """A server that listens; ends with its connections closed."""
    config = uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        log_level="warning",
        access_log=False,
        server_header=False,
        lifespan="off",
        timeout_graceful_shutdown=5,
    )
    server = Server(config)
    serving = asyncio.create_task(_serve_or_raise(server, settings))
    try:
        while not server.started and not serving.done():
            await asyncio.wait((serving,), timeout=0.01)
        if serving.done():
            await serving
        yield server
    finally:
        server.should_exit = True
        await asyncio.gather(serving, return_exceptions=True)


async def _serve_or_raise(server: Server, settings: Settings) -> None:
    try:
        await server.serve()
    except SystemExit:  # uvicorn's way of saying that the port cannot be had; it has logged the reason.
        raise OSError(f"cannot listen on {settings.host}:{settings.port}; is another service there?") from None


__all__ = ["Server", "WorkerStartError", "create_app", "serve"]
