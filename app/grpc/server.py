"""The gRPC server: which methods it has, beside them health and reflection, and when it listens.

Owns: registration, turning errors into statuses, start and stop. Needs `anychip[grpc]`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2

from app.access.rules import Bind
from app.access.tls import Tls
from app.errors import ServiceError, internal_error, without_frames
from app.grpc.entrance import Door, Entrance, Interceptor
from app.grpc.messages import METHODS, POOL, SERVICE, message_of
from app.grpc.methods import Methods, refuse
from app.grpc.receiving import OVERHEAD_BYTES, Receiver
from app.protocols.ingress import Ingress
from app.protocols.interrupt import ended_before
from app.serving.service import Service

log = logging.getLogger("anychip.rpc")

_GRACE_S = 5.0
_HURRY_S = 0.1
_WATCH_INTERVAL_S = 0.5
_STREAMS_A_CONNECTION = 256


@contextlib.asynccontextmanager
async def listening(
    methods: Methods,
    ingress: Ingress,
    host: str,
    port: int,
    bind: Bind = "public",
    *,
    hurry: asyncio.Event,
    tls: Tls | None = None,
) -> AsyncIterator[str]:
    """A server on a port; yields its address. `bind`: which of the two it is. In a `hurry` it waits for no client.

    Raises OSError when the port is taken.
    """
    settings = ingress.service.settings
    largest = settings.max_body_bytes + OVERHEAD_BYTES
    server = grpc.aio.server(
        interceptors=(Interceptor(ingress.access, bind),),
        options=[
            ("grpc.max_receive_message_length", largest),
            ("grpc.max_send_message_length", -1),
            ("grpc.max_concurrent_streams", _STREAMS_A_CONNECTION),
            ("grpc.max_metadata_size", settings.max_header_bytes),
            ("grpc.so_reuseport", 0),  # Else two services would share a port, and nobody would know.
        ],
        maximum_concurrent_rpcs=settings.max_connections,
    )
    server.add_generic_rpc_handlers((_handlers(methods, Receiver(ingress), Entrance(ingress.access, bind)),))
    health_pb2_grpc.add_HealthServicer_to_server(_Health(ingress.service), server)
    names = (SERVICE, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name, reflection.SERVICE_NAME)
    for module in (health_pb2, reflection_pb2):
        POOL.AddSerializedFile(module.DESCRIPTOR.serialized_pb)
    reflection.enable_server_reflection(names, server, pool=POOL)
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        if tls is not None:
            server.add_secure_port(address, tls.grpc_credentials())
        else:
            server.add_insecure_port(address)
    except RuntimeError:
        raise OSError(f"cannot listen on {address} for gRPC; is another service there?") from None
    await server.start()
    try:
        yield address
    finally:
        stopping = asyncio.ensure_future(server.stop(_GRACE_S))
        if not await ended_before(stopping, hurry):
            await server.stop(_HURRY_S)


def _handlers(methods: Methods, receiver: Receiver, entrance: Entrance) -> Any:
    """Requests come as bytes, and those of calls with one message as a stream of one: `receiver` reads them."""
    handlers = {}
    for name, descriptor in METHODS.items():
        method = getattr(methods, re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower())
        kind = message_of(descriptor.input_type)
        serializer = _serialized
        if descriptor.client_streaming:
            behaviour = _streaming(method, receiver, entrance.of(name), kind)
            handlers[name] = grpc.stream_stream_rpc_method_handler(behaviour, response_serializer=serializer)
        else:
            behaviour = _answering(method, receiver, entrance.of(name), kind)
            handlers[name] = grpc.stream_unary_rpc_method_handler(behaviour, response_serializer=serializer)
    return grpc.method_handlers_generic_handler(SERVICE, handlers)


def _serialized(answer: Any) -> bytes:
    """Tensors are serialised where they are made: large ones not in the event loop."""
    return answer if isinstance(answer, bytes) else answer.SerializeToString()


def _answering(
    method: Callable[[Any, Any], Any], receiver: Receiver, door: Door, kind: type[Any]
) -> Callable[[Any, Any], Any]:
    """The method with its errors as statuses."""

    async def answer(requests: Any, call: Any) -> Any:
        try:
            with door.recorded(call) as entry:
                calls, share = receiver.shares(entry.caller)
                with calls, share:
                    calls.take(1)
                    request = await receiver.one(requests, share, kind)
                    entry.about(request)
                    return await method(request, call)
        except ServiceError as error:
            failure = without_frames(error)
        except Exception:
            log.exception("%s failed", method.__name__)
            failure = internal_error()
        return await refuse(call, failure)

    return answer


def _streaming(
    method: Callable[[Any, Any], Any], receiver: Receiver, door: Door, kind: type[Any]
) -> Callable[[Any, Any], Any]:
    async def answer(requests: Any, call: Any) -> AsyncIterator[Any]:
        try:
            calls, share = receiver.shares(door.admit(call))
            with calls, share:
                calls.take(1)
                # Whoever may begin a stream may not go on when its key is gone.
                still_admitted = door.admitted_each(receiver.each(requests, share, kind), call)
                async for response in method(still_admitted, call):
                    yield response
            return
        except ServiceError as error:
            failure = without_frames(error)
        except Exception:
            log.exception("%s failed", method.__name__)
            failure = internal_error()
        await refuse(call, failure)

    return answer


class _Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """grpc.health.v1, for the server ("") and the inference service: serving while every model has a worker."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def _status(self) -> Any:
        statuses = health_pb2.HealthCheckResponse
        return statuses.NOT_SERVING if self._service.readiness.why_not() else statuses.SERVING

    async def Check(self, request: Any, context: Any) -> Any:  # noqa: N802
        """The status now."""
        if request.service not in ("", SERVICE):
            await context.abort(grpc.StatusCode.NOT_FOUND, f"there is no service {request.service!r} here")
        return health_pb2.HealthCheckResponse(status=self._status())

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        """The status now, and whenever it is another."""
        known = request.service in ("", SERVICE)
        last = None
        while True:
            status = self._status() if known else health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
            if status != last:
                last = status
                yield health_pb2.HealthCheckResponse(status=status)
            await asyncio.sleep(_WATCH_INTERVAL_S)
