"""The FastAPI application and the server around it: start, signals, drain, stop.

Owns: the routes' assembly, the short way to the hot one and the order of shutdown. Must not know how images become
predictions.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
import logging
import re
import signal
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any

import uvicorn
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from app.config import Settings
from app.errors import Code, ServiceError
from app.http.api_description import describe_api
from app.http.body import BodyBudget
from app.http.connection import OnePieceProtocol
from app.http.docs_page import mount_docs
from app.http.edge import Edge
from app.http.playground import mount_playground
from app.http.routes import devices, infer, predict, repository, stats_stream, status, torchserve, v2
from app.observability.tracing import Tracing, from_settings, untraced
from app.observability.watchdog import LoopWatchdog
from app.serving.repository import Repository
from app.serving.service import Service
from app.workers.process import WorkerStartError
from models import Model

log = logging.getLogger("anychip")

_CODES: dict[int, Code] = {404: "NOT_FOUND", 405: "METHOD_NOT_ALLOWED", 413: "BODY_TOO_LARGE"}
_PREDICT = re.compile(r"/v1/models/([^/]+):predict")
_INFER = re.compile(r"/v2/models/([^/]+)(?:/versions/([^/]+))?/infer")


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


def _telemetry(tracing: Tracing | None) -> dict[str, Any]:
    """FastAPI's own spans, where it has them: ours then go into these."""
    if tracing is None or "telemetry" not in inspect.signature(FastAPI).parameters:
        return {}
    return {"telemetry": {"tracer_provider": tracing.provider, "metrics": False, "logs": False, "exclude": untraced}}


def create_app(service: Service) -> FastAPI:
    """The application over a service that somebody else starts and stops."""
    app = FastAPI(
        title="anychip",
        **_telemetry(service.tracing),
        summary="Classifies and detects in images, on any accelerator PyTorch reaches",
        docs_url=None,
        redoc_url=None,
    )
    app.state.service = service
    app.state.repository = Repository(service)
    app.state.bodies = BodyBudget(service.settings.max_buffered_bytes)
    app.state.stats_feed = stats_stream.StatsFeed(service)
    app.add_exception_handler(HTTPException, _framework_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.include_router(predict.router)
    app.include_router(status.router)
    app.include_router(v2.router)
    app.include_router(infer.router)
    app.include_router(repository.router)
    app.include_router(devices.router)
    app.include_router(torchserve.router)
    app.include_router(stats_stream.router)
    describe_api(app)
    mount_docs(app)
    if service.settings.playground:
        mount_playground(app)
    app.add_middleware(Edge, service=service)
    return app


class Front:
    """What uvicorn serves: the hot routes at once, everything else through FastAPI.

    FastAPI describes the hot routes and would serve them alike, for a third of the processor time of a whole request.
    """

    def __init__(self, app: FastAPI) -> None:
        self._app = app
        self._predict = Edge(self._answer_predict, app.state.service)
        self._infer = Edge(self._answer_infer, app.state.service)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        app: ASGIApp = self._app
        if scope["type"] == "http" and scope["method"] == "POST":
            path = scope["path"]
            if path.endswith(":predict") and _PREDICT.fullmatch(path):
                app = self._predict
            elif path.endswith("/infer") and _INFER.fullmatch(path):
                app = self._infer
        await app(scope, receive, send)

    async def _answer_predict(self, scope: Scope, receive: Receive, send: Send) -> None:
        model = scope["path"][len("/v1/models/") : -len(":predict")]
        scope["anychip"].route = predict.ROUTE
        state = self._app.state
        body = await predict.answer(state.service, state.bodies, scope, receive, model)
        await _send(send, body, [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))])

    async def _answer_infer(self, scope: Scope, receive: Receive, send: Send) -> None:
        match = _INFER.fullmatch(scope["path"])
        assert match
        state = self._app.state
        model, version = match[1], match[2] or ""
        scope["anychip"].route = infer.ROUTE
        await _send(send, *await infer.answer(state.service, state.bodies, scope, receive, model, version=version))


async def _send(send: Send, body: bytes, headers: list[tuple[bytes, bytes]]) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


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
    tracing = from_settings(settings)
    service = Service(settings, models, tracing)
    watchdog = LoopWatchdog(on_longest=service.metrics.event_loop_stall.set)
    watchdog.start()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    loop.add_signal_handler(signal.SIGUSR1, service.release_in_background)
    try:
        app = create_app(service)
        async with _listening(Front(app), settings) as server, _listening_for_rpc(app, settings):
            address = f"http://{settings.host}:{server.servers[0].sockets[0].getsockname()[1]}"
            stopping = asyncio.create_task(stop.wait())
            starting = asyncio.create_task(service.start())
            try:
                await asyncio.wait((starting, stopping), return_when=asyncio.FIRST_COMPLETED)
                if starting.done():
                    await starting
                    # All that was imported and made until now stays: a collection that walks over it (torch alone is
                    # hundreds of thousands of objects) would stop every request for a tenth of a second.
                    gc.collect()
                    gc.freeze()
                    watchdog.forget()
                    log.info("ready at %s", address)
                    if on_ready is not None:
                        on_ready(address)
                    await stopping
            finally:
                stopping.cancel()
                starting.cancel()
                await asyncio.gather(starting, stopping, return_exceptions=True)
            stop.clear()
            await drain(service, settings, stop)
    finally:
        await service.stop()
        watchdog.close()
        if tracing is not None:
            await asyncio.to_thread(tracing.close)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            loop.remove_signal_handler(number)


async def drain(service: Service, settings: Settings, hurry: asyncio.Event) -> None:
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
async def _listening(app: ASGIApp, settings: Settings) -> AsyncIterator[Server]:
    """A server that listens; ends with its connections closed."""
    config = uvicorn.Config(
        app,
        http=OnePieceProtocol,
        host=settings.host,
        port=settings.port,
        log_config=None,  # Its lines are ours to form.
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,  # Nothing here asks where a request came from.
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


@contextlib.asynccontextmanager
async def _listening_for_rpc(app: FastAPI, settings: Settings) -> AsyncIterator[None]:
    """gRPC, where it is wanted. Raises OSError when its packages are missing or its port is taken."""
    if not settings.grpc_port:
        yield
        return
    try:
        from app.grpc import methods, server
    except ImportError as error:
        raise OSError(f"--grpc-port needs the packages of anychip[grpc]: {error}") from None
    state = app.state
    served = methods.Methods(state.service, state.repository, state.bodies)
    async with server.listening(served, state.service, settings) as address:
        log.info("gRPC at %s", address)
        yield


async def _serve_or_raise(server: Server, settings: Settings) -> None:
    try:
        await server.serve()
    except SystemExit:  # uvicorn's way of saying that the port cannot be had; it has logged the reason.
        raise OSError(f"cannot listen on {settings.host}:{settings.port}; is another service there?") from None


__all__ = ["Server", "WorkerStartError", "create_app", "serve"]
