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

from app.config import Settings
from app.errors import ServiceError
from app.grpc.messages import METHODS, POOL, SERVICE, message_of
from app.grpc.methods import Methods, refuse
from app.serving.service import Service

log = logging.getLogger("anychip.rpc")

_GRACE_S = 5.0
_WATCH_INTERVAL_S = 0.5
_OVERHEAD_BYTES = 64 * 1024  # Of a message, beside what max_body_bytes limits.


@contextlib.asynccontextmanager
async def listening(methods: Methods, service: Service, settings: Settings) -> AsyncIterator[str]:
    """A server on `settings.grpc_port`; yields its address. Raises OSError when the port is taken."""
    largest = settings.max_body_bytes + _OVERHEAD_BYTES
    server = grpc.aio.server(
        options=[
            ("grpc.max_receive_message_length", largest),
            ("grpc.max_send_message_length", -1),
            ("grpc.so_reuseport", 0),  # Else two services would share a port, and nobody would know.
        ]
    )
    server.add_generic_rpc_handlers((_handlers(methods),))
    health_pb2_grpc.add_HealthServicer_to_server(_Health(service), server)
    names = (SERVICE, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name, reflection.SERVICE_NAME)
    for module in (health_pb2, reflection_pb2):
        POOL.AddSerializedFile(module.DESCRIPTOR.serialized_pb)
    reflection.enable_server_reflection(names, server, pool=POOL)
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    address = f"{host}:{settings.grpc_port}"
    try:
        server.add_insecure_port(address)
    except RuntimeError:
        raise OSError(f"cannot listen on {address} for gRPC; is another service there?") from None
    await server.start()
    try:
        yield address
    finally:
        await server.stop(_GRACE_S)


def _handlers(methods: Methods) -> Any:
    handlers = {}
    for name, descriptor in METHODS.items():
        method = getattr(methods, re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower())
        streams = descriptor.client_streaming
        kind = grpc.stream_stream_rpc_method_handler if streams else grpc.unary_unary_rpc_method_handler
        handlers[name] = kind(
            method if streams else _answering(method),
            request_deserializer=message_of(descriptor.input_type).FromString,
            response_serializer=message_of(descriptor.output_type).SerializeToString,
        )
    return grpc.method_handlers_generic_handler(SERVICE, handlers)


def _answering(method: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """The method with its errors as statuses."""

    async def answer(request: Any, context: Any) -> Any:
        try:
            return await method(request, context)
        except ServiceError as error:
            failure = error
        except Exception:
            log.exception("%s failed", method.__name__)
            failure = ServiceError("INTERNAL", "something went wrong here; the log knows more")
        return await refuse(context, failure)

    return answer


class _Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """grpc.health.v1, for the server ("") and the inference service: serving while every model has a worker."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def _status(self) -> Any:
        statuses = health_pb2.HealthCheckResponse
        return statuses.NOT_SERVING if self._service.not_ready() else statuses.SERVING

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
