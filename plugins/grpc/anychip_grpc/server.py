"""The gRPC server: its methods, when it listens, its answers before there is a service, and its certificate."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import re
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from anychip_grpc.answering import OVERHEAD_BYTES, Method, Receiver
from anychip_grpc.messages import METHODS, POOL, SERVICE, message
from anychip_grpc.methods import HEALTH, REFLECTION, CallContext, Methods
from anychip_grpc.relay import Relay
from app.access.rules import Bind
from app.access.tls import Tls
from app.config import ADMIN_PORT_DISTANCE, LOOPBACK, Settings
from app.errors import ERRORS
from app.ingress.budget import Budget
from app.ingress.context import ended_before
from app.ingress.ingress import Ingress
from app.ingress.listener import HANDSHAKE_S

log = logging.getLogger("anychip")

_ADMIN_CONNECTIONS = 64
_GRACE_S = 5.0
_HURRY_S = 0.1
_STREAMS_A_CONNECTION = 256
_IDLE_S = 600
_METADATA_BYTES = 64 * 1024
_CHECKS = 256
_WATCHES = 256
_WATCHES_A_CLIENT = 16
_NO_METHOD = "there is no method {} here; shared memory, sequences, tracing and log settings are not offered"


def watches() -> Budget:
    """Return the budget of streams that stay open, of health and reflection."""
    spare = _WATCHES - 2 * _WATCHES_A_CLIENT
    return Budget(_WATCHES, "streams of health and reflection", least=_WATCHES_A_CLIENT, spare=spare)


@contextlib.asynccontextmanager
async def listening(
    settings: Settings,
    progress: Callable[[], str],
    connections: Budget,
    hurry: asyncio.Event,
    tls: Tls | None,
) -> AsyncIterator[Callable[[Ingress], None]]:
    """Listen on the port of the settings, and on that of administration if it has its own; yield the function to call
    once there is a service. The entry `grpc` of the group `anychip.transports`.

    `progress`: how far the start is; `connections`: counts them. In a `hurry` it waits for no client. Raises OSError
    when the port is taken.
    """
    ports: dict[Bind, RpcPort] = {}

    def become(ingress: Ingress) -> None:
        calls = Budget(settings.max_connections, "calls")
        for bind, opened in ports.items():
            opened.become(ingress, bind, calls)

    options = [
        ("grpc.max_receive_message_length", settings.max_body_bytes + OVERHEAD_BYTES),
        ("grpc.max_send_message_length", -1),
        ("grpc.max_concurrent_streams", _STREAMS_A_CONNECTION),
        ("grpc.max_metadata_size", _METADATA_BYTES),
        ("grpc.server_handshake_timeout_ms", int(HANDSHAKE_S * 1e3)),
        ("grpc.max_connection_idle_ms", _IDLE_S * 1000),
    ]
    async with contextlib.AsyncExitStack() as stack:

        async def listen(bind: Bind, host: str, port: int, counted: Budget, tls: Tls | None = None) -> None:
            server, relay = grpc.aio.server(options=options), Relay(counted, settings.max_connections)
            address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
            opened = RpcPort(relay, progress)
            server.add_generic_rpc_handlers((opened,))
            with relay.core() as core:
                if tls is not None:
                    server.add_secure_port(core, credentials(tls))
                else:
                    server.add_insecure_port(core)
            await server.start()
            try:
                await relay.listener.listen(host, port)
            except BaseException as error:  # A cancellation, too: the server has started.
                await _stop(server, relay, hurry)
                if not isinstance(error, OSError):
                    raise
                raise OSError(f"cannot listen on {address} for gRPC; is another service there?") from None
            stack.push_async_callback(_stop, server, relay, hurry)
            ports[bind] = opened
            log.info("%s at %s", "gRPC" if bind == "public" else "administration by gRPC", address)

        await listen("public", settings.host, settings.grpc_port, connections, tls)
        if settings.admin == "loopback":
            counted = Budget(_ADMIN_CONNECTIONS, "connections", least=_ADMIN_CONNECTIONS)
            try:
                await listen("admin", LOOPBACK, settings.grpc_port + ADMIN_PORT_DISTANCE, counted)
            except OSError as error:
                log.warning("%s; administration by gRPC is off until --grpc-port is below a free one", error)
        yield become


async def _stop(server: Any, relay: Relay, hurry: asyncio.Event) -> None:
    relay.listener.close()
    stopping = asyncio.ensure_future(server.stop(_GRACE_S))
    at_leisure = await ended_before(stopping, hurry)
    if not at_leisure:
        await server.stop(_HURRY_S)
    await relay.wait_closed(_GRACE_S if at_leisure else _HURRY_S)


class RpcPort(grpc.GenericRpcHandler):  # type: ignore[misc]
    """All methods, once there is a service. Until then it answers that it lives, that nothing is ready, and why.

    Requests come as bytes, and those of calls with one message as a stream of one.
    """

    def __init__(self, relay: Relay, progress: Callable[[], str]) -> None:
        self._relay, self._progress = relay, progress
        self._handlers: dict[str, Any] = {}
        self._opened = asyncio.Event()

    def become(self, ingress: Ingress, bind: Bind, calls: Budget) -> None:
        """Answer for a service from now on. `bind`: which of its two ports this is; `calls`: counts those of both."""
        largest = ingress.link.settings.max_body_bytes + OVERHEAD_BYTES
        # Health and reflection wait for no other request, and take little: room for few messages, each of which could
        # be as large as any, and half of it for addresses that have none.
        room = Budget(8 * largest, "bytes of health checks", least=2 * largest, spare=4 * largest)
        checks = Budget(_CHECKS, "health checks", least=_CHECKS // 16, spare=_CHECKS // 2)
        models, checking, watching = (
            Receiver(largest, ingress.converter, calls_of, bodies)
            for calls_of, bodies in ((calls, ingress.bodies), (checks, room), (watches(), room))
        )
        for module in (health_pb2, reflection_pb2):
            POOL.AddSerializedFile(module.DESCRIPTOR.serialized_pb)
        methods = Methods(ingress)
        served: list[tuple[Any, Any, Receiver]] = [
            *(
                (descriptor, getattr(methods, re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()), models)
                for name, descriptor in METHODS.items()
            ),
            (HEALTH.methods_by_name["Check"], methods.check, checking),
            (HEALTH.methods_by_name["Watch"], methods.watch, watching),
            (REFLECTION.methods[0], methods.reflect, watching),
        ]
        for descriptor, behaviour, receiver in served:
            method = Method(behaviour, descriptor, receiver, self._relay, ingress=ingress, bind=bind)
            self._handlers[method.path] = method.handler
        self._opened.set()

    def service(self, details: Any) -> Any:
        """Return the handler of a call; a refusing one if there is no such method, or no service yet."""
        other = functools.partial(self._other, details.method, self._opened.is_set())
        return self._handlers.get(details.method) or grpc.stream_stream_rpc_method_handler(other)

    async def _other(self, path: str, opened: bool, _requests: Any, call: CallContext) -> None:
        self._relay.begin(call)
        if opened:
            await call.abort(grpc.StatusCode.UNIMPLEMENTED, _NO_METHOD.format(path[:128]))
        answer = _OPENING.get(path)
        if answer is None:
            trailing = (("code", "NOT_READY"), ("retry-after", "1"))
            await call.abort(grpc.StatusCode[ERRORS["NOT_READY"].grpc], self._progress(), trailing)
        await call.write(answer)
        if path == _WATCH:  # Clients reopen an ended stream at once; then the service answers it.
            await self._opened.wait()


_WATCH = f"/{HEALTH.full_name}/Watch"
_NOT_SERVING = health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.NOT_SERVING).SerializeToString()
_OPENING = {
    f"/{HEALTH.full_name}/Check": _NOT_SERVING,
    _WATCH: _NOT_SERVING,
    f"/{SERVICE}/ServerLive": message("ServerLiveResponse")(live=True).SerializeToString(),
    f"/{SERVICE}/ServerReady": message("ServerReadyResponse")(ready=False).SerializeToString(),
    f"/{SERVICE}/ModelReady": message("ModelReadyResponse")(ready=False).SerializeToString(),
}
"""Answers before there is a service."""


def credentials(tls: Tls) -> Any:
    """Return the service's TLS for gRPC's C core. Raises OSError."""
    seen = tls.seen

    def configuration() -> Any:
        authority = tls.client_authority.read_bytes() if tls.client_authority is not None else None
        pair = tls.key.read_bytes(), tls.certificate.read_bytes()
        return grpc.ssl_server_certificate_configuration([pair], root_certificates=authority)

    def fetched() -> Any:
        """Return a changed certificate; None: it is unchanged. gRPC asks before each handshake, in its own thread."""
        nonlocal seen
        if seen == tls.seen:
            return None
        seen = tls.seen
        try:
            return configuration()
        except OSError as error:
            logging.getLogger("anychip.access").error("gRPC's certificate stays as it was: %s", error)
            return None

    return grpc.dynamic_ssl_server_credentials(configuration(), fetched, tls.client_authority is not None)
