"""The server: start, signals, drain, stop; the listening sockets, and the FastAPI application over a service."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from anychip_base.extras import entry_points, how_to_install
from app.access.access import Access, check_exposure, check_secrets
from app.access.tls import Tls
from app.compat import client, torchserve
from app.config import ADMIN_PORT_DISTANCE, LOOPBACK, Settings
from app.config.values import CLIENTS, split
from app.errors import Code, ServiceError, invalid_request
from app.fleet.process import stop_forking
from app.http.api_description import describe_api, mount_docs
from app.http.connection import LimitedProtocol
from app.http.edge import BIND, Edge, opening_app
from app.http.hot import protocol
from app.http.playground.page import mount_playground
from app.http.routes import infer, predict, repository, status
from app.http.server import Server
from app.ingress.budget import Budget, freeze
from app.ingress.context import ended_before
from app.ingress.ingress import Ingress, connections
from app.ingress.listener import Listener, make_room
from app.ingress.threads import begun
from app.observability.tracing import from_settings
from app.observability.watchdog import LoopWatchdog
from app.serving.ingresses import OWNERS_SHARE, count_of
from app.serving.opening import Opening
from app.serving.service import Service
from backends import Choice
from models import Model

log = logging.getLogger("anychip")

_RPC_DESCRIPTORS = 3
"""Descriptors of a gRPC connection: the client's, and both ends of the socket to gRPC's core (plugins/grpc)."""
TRANSPORT_GROUP = "anychip.transports"
"""Entry-point group of transports other than HTTP. An entry is an asynchronous context manager. Within it, it listens;
it yields a function, which is called with the ingress once there is a service.
"""
_ADMIN_CONNECTIONS = 512
_HURRY_S = 0.1
"""Time for each part that still goes on after a second signal."""
_LOGGED_EVERY_S = 5.0
"""Pause between two words on how far the start is."""
_CODES: dict[int, Code] = {404: "NOT_FOUND", 405: "METHOD_NOT_ALLOWED", 413: "BODY_TOO_LARGE"}
_THREADS = 8
"""Threads for `asyncio.to_thread`: files, messages to workers, comparisons, metrics."""


async def serve(settings: Settings, on_ready: Callable[[str], None]) -> None:
    """Serve until SIGTERM or SIGINT, then drain. `on_ready` gets the address once every model answers.

    The port is open before the models are read: it says how far that is. Raises ModelError, BackendUnavailableError,
    OpeningError if they cannot be read, ChildStartError if a worker cannot start, OSError if the port is taken.
    """
    room = make_room(settings.max_connections, _RPC_DESCRIPTORS if settings.grpc_port else 1)
    check_exposure(settings)
    asyncio.get_running_loop().set_default_executor(begun(_THREADS, "asyncio"))
    opening, tls = Opening(), Tls.of(settings)
    counted = connections(min(settings.max_connections, room))
    application = opening_app(lambda: opening.progress)
    async with (
        _listening(application, LimitedProtocol, counted, settings, (settings.host, settings.port), tls=tls) as server,
        _listening_for_administration(application, settings, server) as admin,
        contextlib.AsyncExitStack() as rpc,
    ):
        ports = _Ports(server, admin, rpc, lambda: opening.progress)
        await ports.listen_for_rpc(settings)
        # Signals end the process meanwhile: nothing is lost.
        async with _progress_logged(ports.progress):
            try:
                models, choice = await opening.apart(settings)
            except BaseException:
                await stop_forking()
                raise
        assert choice is not None
        await _serve(settings, models, choice, ports, on_ready)


async def _serve(
    settings: Settings,
    models: Sequence[Model],
    choice: Choice,
    ports: _Ports,
    on_ready: Callable[[str], None],
) -> None:
    server, admin_server = ports.server, ports.admin
    stop, tls = server.hurry, server.tls
    loop = asyncio.get_running_loop()
    tracing = from_settings(settings)
    service = Service(settings, models, tracing, choice)
    count = count_of(settings, traced=tracing is not None)
    tunnelled = Listener(server.connection, server.connections)  # It listens nowhere: an ingress has ended its TLS.

    def tunnel(end: socket.socket, address: str, encrypted: bool, ended: Callable[[], None]) -> None:
        """Serve a connection that an ingress hands on, with requests that are not for it, until it has `ended`."""
        made = server.connection()
        made.tunnelled_from = address, encrypted
        end.setblocking(False)
        tunnelled.begin(end, address, ended, made)

    ingresses = service.made_ingresses(count, tunnel) if count else None
    watchdog = LoopWatchdog(on_longest=service.metrics.event_loop_stall_seconds.set)
    watchdog.start()
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # It released memory once, and scripts may still send it.
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    try:
        check_secrets(settings, programs=any(model.is_program for model in models))
        app = create_app(service, share=OWNERS_SHARE if count else 1.0)
        app.state.ingress.connections = server.connections
        ports.become(app)
        async with ports.rpc.pop_all() as ports.rpc:
            address = f"{'https' if tls else 'http'}://{settings.host}:{port_of(server)}"
            renewing = asyncio.create_task(tls.keep_fresh()) if tls else None
            beside = [ingresses.start()] if ingresses is not None else []
            # The description would take a tenth of a second at the first request.
            starting = asyncio.gather(service.start(), asyncio.to_thread(app.openapi), *beside)
            shared: Listener | None = None
            try:
                async with _progress_logged(service.administration.why_not):
                    started = await ended_before(starting, stop)
                if started:
                    await starting
                    freeze()
                    watchdog.forget()
                    shared = await _sharing(server, settings)
                    if ingresses is not None:
                        for each in server.servers:
                            each.passing = ingresses.take
                    log.info("ready at %s", address)
                    on_ready(address)
                    await stop.wait()
            finally:
                starting.cancel()
                await asyncio.gather(starting, return_exceptions=True)
                if renewing is not None:
                    renewing.cancel()
            stop.clear()
            if shared is not None:
                shared.close()  # From now on the others get all new connections.
            await drain(service, settings, stop)
            app.state.ingress.refuse_what_is_under_way()
            if ingresses is not None:
                ingresses.end()
            # While listeners are open: new and waiting requests are told why they get no other answer.
            await _stopped(service, stop)
            for each in filter(None, (server, admin_server)):
                each.should_exit = True  # Both at once.
    finally:
        if ingresses is not None:
            await ingresses.stop(hurry=stop.is_set())
        await _stopped(service, stop)
        await stop_forking()
        watchdog.close()
        if tracing is not None:
            await asyncio.to_thread(tracing.close)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


@contextlib.asynccontextmanager
async def _progress_logged(progress: Callable[[], str]) -> AsyncIterator[None]:
    async def log_progress() -> None:
        while True:
            await asyncio.sleep(_LOGGED_EVERY_S)
            log.info("%s", progress())

    telling = asyncio.create_task(log_progress(), name="progress")
    try:
        yield
    finally:
        telling.cancel()


async def drain(service: Service, settings: Settings, hurry: asyncio.Event) -> None:
    """Turn readiness off, serve on for the grace period, refuse, finish accepted images. A second signal hurries."""
    service.administration.draining = True
    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(hurry.wait(), settings.grace_s)
    service.refuse()
    drained = asyncio.create_task(service.drained())
    try:
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(ended_before(drained, hurry), settings.drain_s)
    finally:
        drained.cancel()
        await asyncio.gather(drained, return_exceptions=True)
    cut = service.images_under_way()
    if cut:
        log.warning("%d images were cut off by the shutdown", cut)


async def _stopped(service: Service, hurry: asyncio.Event) -> None:
    stopping = asyncio.create_task(service.stop(), name="stop of the service")
    if not await ended_before(stopping, hurry):
        service.kill()
        await asyncio.wait((stopping,), timeout=_HURRY_S)
    if stopping.done():
        await stopping


def port_of(server: Server) -> int:
    """Return the port that a server listens on."""
    port: int = server.servers[0].sockets[0].getsockname()[1]
    return port


@contextlib.asynccontextmanager
async def _listening(
    app: ASGIApp,
    kind: Callable[..., asyncio.BaseProtocol],
    counted: Budget,
    settings: Settings,
    where: tuple[str, int],
    *,
    hurry: asyncio.Event | None = None,
    tls: Tls | None = None,
) -> AsyncIterator[Server]:
    """Run a server that listens; close its connections at the end, in a `hurry` also those that read no answer."""
    hurry = hurry or asyncio.Event()
    server = Server(app, kind, settings, where, counted, hurry=hurry, tls=tls)
    serving = asyncio.create_task(server.serve())
    try:
        while not server.started and not serving.done():
            await asyncio.wait((serving,), timeout=0.01)
        if serving.done():
            await serving
        yield server
    finally:
        server.should_exit = True
        if not await ended_before(serving, hurry):
            server.force_exit = True
            await asyncio.wait((serving,), timeout=_HURRY_S)
            for connection in list(server.server_state.connections):
                cast(Any, connection).transport.abort()
        await asyncio.gather(serving, return_exceptions=True)
        for listener in getattr(server, "servers", ()):
            await listener.wait_closed()


async def _sharing(server: Server, settings: Settings) -> Listener | None:
    """Listen also on the port that is shared with others, if that is wanted: the system deals connections out.

    Called when the service is ready, as connections come at once. Raises OSError.
    """
    if not settings.reuse_port:
        return None
    try:
        listener = await server.listen(settings.reuse_port, settings.host, reuse_port=True)
    except OSError:
        message = f"cannot share {settings.host}:{settings.reuse_port}; it belongs to one process, or to another user's"
        raise OSError(message) from None
    log.info("shares port %d", settings.reuse_port)
    return listener


@dataclass
class _Ports:
    """Ports of this process. `rpc`: ends the listening for gRPC; `progress`: how far the start is."""

    server: Server
    admin: Server | None
    rpc: contextlib.AsyncExitStack
    progress: Callable[[], str]
    _rpc_becomes: Callable[[Ingress], None] | None = None

    async def listen_for_rpc(self, settings: Settings) -> None:
        """Listen for gRPC, if it is wanted. Raises OSError if its packages are missing or its port is taken."""
        if not settings.grpc_port:
            return
        try:
            found = [entry.load() for entry in entry_points(TRANSPORT_GROUP, name="grpc")]
        except ImportError as error:
            raise OSError(f"--grpc-port needs more packages ({error}): {how_to_install('grpc')}") from None
        if not found:
            raise OSError(f"gRPC (--grpc-port) is a package of its own: {how_to_install('grpc')}")
        public = self.server
        listening = found[0](settings, self.progress, public.connections, public.hurry, public.tls)
        self._rpc_becomes = await self.rpc.enter_async_context(listening)

    def become(self, app: FastAPI) -> None:
        ingress, hot = app.state.ingress, (torchserve.HOT,)
        self.server.become(app, protocol(ingress, more=hot))
        if self.admin is not None:

            async def administered(scope: Scope, receive: Receive, send: Send) -> None:
                scope[BIND] = "admin"
                await app(scope, receive, send)

            self.admin.become(administered, protocol(ingress, "admin", hot))
        if self._rpc_becomes is not None:
            self._rpc_becomes(ingress)


@contextlib.asynccontextmanager
async def _listening_for_administration(
    app: ASGIApp, settings: Settings, public: Server
) -> AsyncIterator[Server | None]:
    """Listen on this machine alone, if that is wanted. Raises OSError if a port that was asked for is taken."""
    if settings.admin != "loopback":
        yield None
        return
    port = settings.admin_port or (settings.port and port_of(public) + ADMIN_PORT_DISTANCE)
    # A budget of its own: it answers, also the liveness probe, however full the public ports are.
    counted = Budget(_ADMIN_CONNECTIONS, "connections", least=_ADMIN_CONNECTIONS)
    server = None
    async with contextlib.AsyncExitStack() as stack:
        try:
            listening = _listening(app, LimitedProtocol, counted, settings, (LOOPBACK, port), hurry=public.hurry)
            server = await stack.enter_async_context(listening)
        except OSError as error:
            if settings.admin_port:
                raise
            # Another service has it, perhaps another of ours: that is no reason to serve nothing.
            log.warning("%s; administration is off here until --admin-port names a port", error)
        else:
            log.info("administration at http://%s:%d", LOOPBACK, port_of(server))
        yield server


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
    raise invalid_request(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None


def create_app(service: Service, *, hosted: bool = False, share: float = 1.0) -> FastAPI:
    """Make the application over a service that its caller starts and stops; `hosted`: others listen for it. `share`: of
    the bytes that requests may hold; other ingresses have the rest.

    Raises KeysError.
    """
    app = FastAPI(
        title="anychip",
        summary="Classifies and detects in images, on any accelerator PyTorch reaches",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.link = service.link
    app.state.ingress = ingress = Ingress(service.link, Access(service.settings, hosted=hosted), share)
    service.on_stop.append(ingress.close)
    app.state.stats_feed = status.StatsFeed(service.link)
    app.add_exception_handler(HTTPException, _framework_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    settings = service.settings
    on_public = settings.admin == "port"
    add_routes(app, playground=settings.playground, compat=split(settings.compat), administered=on_public)
    app.add_middleware(Edge, ingress=ingress)
    return app


def add_routes(app: FastAPI, *, playground: bool, compat: Sequence[str], administered: bool = True) -> None:
    """Add every route. Each one needs a rule in app.access.rules, or no client reaches it."""
    for name in compat:  # Before ours: X-AnyLabeling's list of models has more in it.
        if name not in CLIENTS:
            app.include_router(client.router(name))
    for each in (predict, status, infer, repository, torchserve):
        app.include_router(each.router)
    app.include_router(repository.devices)
    describe_api(app)
    mount_docs(app, administered=administered)
    app.state.page = None
    if playground:
        mount_playground(app)
