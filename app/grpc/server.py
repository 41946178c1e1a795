"""The gRPC server: which methods it has, beside them health and reflection, and when it listens.

Owns: registration, start and stop. Needs `anychip[grpc]`.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator
from typing import Any

import grpc
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2

from app.access.rules import Bind
from app.access.tls import Tls
from app.grpc.answering import Method, unknown
from app.grpc.calls import Calls
from app.grpc.messages import METHODS, POOL, SERVICE
from app.grpc.methods import Methods
from app.grpc.receiving import OVERHEAD_BYTES, Receiver
from app.grpc.relay import Relay
from app.grpc.standard import HEALTH, Health, Reflection
from app.ingress.budget import Budget
from app.ingress.ingress import Ingress
from app.ingress.interrupt import ended_before
from app.ingress.listener import HANDSHAKE_S

_GRACE_S = 5.0
_HURRY_S = 0.1
_STREAMS_A_CONNECTION = 256
_IDLE_S = 600
_METADATA_BYTES = 64 * 1024
_CHECKS = 256
_WATCHES = 256
_WATCHES_A_CLIENT = 16


@contextlib.asynccontextmanager
async def listening(
    methods: Methods,
    ingress: Ingress,
    host: str,
    port: int,
    bind: Bind = "public",
    *,
    connections: Budget,
    hurry: asyncio.Event,
    tls: Tls | None = None,
    reuse_port: bool = False,
) -> AsyncIterator[str]:
    """A server on a port; yields its address. `bind`: which of the two it is; `connections`: counts them. In a `hurry`
    it waits for no client. `reuse_port`: others listen there, too.

    Raises OSError when the port is taken.
    """
    settings = ingress.link.settings
    server = grpc.aio.server(
        options=[
            ("grpc.max_receive_message_length", settings.max_body_bytes + OVERHEAD_BYTES),
            ("grpc.max_send_message_length", -1),
            ("grpc.max_concurrent_streams", _STREAMS_A_CONNECTION),
            ("grpc.max_metadata_size", _METADATA_BYTES),
            ("grpc.server_handshake_timeout_ms", int(HANDSHAKE_S * 1e3)),
            ("grpc.max_connection_idle_ms", _IDLE_S * 1000),
        ],
    )
    relay = Relay(connections)
    server.add_generic_rpc_handlers((_Handlers(methods, ingress, bind, Calls(relay, settings.max_connections)),))
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    with relay.core() as core:
        if tls is not None:
            server.add_secure_port(core, tls.grpc_credentials())
        else:
            server.add_insecure_port(core)
    await server.start()
    try:
        try:
            await relay.listen(host, port, reuse_port=reuse_port)
        except OSError:
            raise OSError(f"cannot listen on {address} for gRPC; is another service there?") from None
        yield address
    finally:
        relay.close()
        stopping = asyncio.ensure_future(server.stop(_GRACE_S))
        at_leisure = await ended_before(stopping, hurry)
        if not at_leisure:
            await server.stop(_HURRY_S)
        await relay.wait_closed(_GRACE_S if at_leisure else _HURRY_S)


class _Handlers(grpc.GenericRpcHandler):  # type: ignore[misc]
    """All methods. Requests come as bytes, and those of calls with one message as a stream of one."""

    def __init__(self, methods: Methods, ingress: Ingress, bind: Bind, calls: Calls) -> None:
        largest = ingress.link.settings.max_body_bytes + OVERHEAD_BYTES
        # Health and reflection wait for no other request, and take little: room for few messages, each of which could
        # be as large as any, and half of it for addresses that have none.
        room = Budget(8 * largest, "bytes of health checks", least=2 * largest, spare=4 * largest)
        checks = Budget(_CHECKS, "health checks", least=_CHECKS // 16, spare=_CHECKS // 2)
        watches = Budget(
            _WATCHES,
            "streams of health and reflection",
            least=_WATCHES_A_CLIENT,
            spare=_WATCHES - 2 * _WATCHES_A_CLIENT,
        )
        models, checking, watching = (
            Receiver(largest, ingress.converter, calls_of, bodies)
            for calls_of, bodies in ((ingress.calls, ingress.bodies), (checks, room), (watches, room))
        )
        for module in (health_pb2, reflection_pb2):
            POOL.AddSerializedFile(module.DESCRIPTOR.serialized_pb)
        checker = Health(ingress.link.administration)
        reflecting = Reflection((SERVICE, HEALTH.full_name, reflection.SERVICE_NAME))
        served: list[tuple[Any, Any, Receiver]] = [
            *((descriptor, getattr(methods, _snake(name)), models) for name, descriptor in METHODS.items()),
            (HEALTH.methods_by_name["Check"], checker.check, checking),
            (HEALTH.methods_by_name["Watch"], checker.watch, watching),
            (reflecting.descriptor, reflecting.info, watching),
        ]
        self._handlers: dict[str, Any] = {}
        for descriptor, behaviour, receiver in served:
            method = Method(behaviour, descriptor, receiver, calls, ingress=ingress, bind=bind)
            self._handlers[method.path] = method.handler
        self._calls = calls

    def service(self, details: Any) -> Any:
        """The handler of a call; the one that refuses where there is no such method."""
        return self._handlers.get(details.method) or unknown(self._calls, details.method)


def _snake(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()
