"""gRPC's own services, beside ours: health checking and reflection.

Owns: their answers, and the time limit of a stream of reflection, which grpcio-reflection leaves open.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2

from anychip_grpc.call import Message, RpcContext
from anychip_grpc.messages import POOL, SERVICE
from app.errors import ServiceError
from app.ingress.interrupt import interrupted_at
from app.link import Administration

HEALTH: Any = health_pb2.DESCRIPTOR.services_by_name["Health"]

_WATCH_INTERVAL_S = 0.5
_STAYS_S = 60.0


class Health:
    """grpc.health.v1, for the server ("") and the inference service: serving while every model has a worker."""

    def __init__(self, administration: Administration) -> None:
        self._administration = administration

    def _status(self) -> Any:
        statuses = health_pb2.HealthCheckResponse
        return statuses.NOT_SERVING if self._administration.why_not() else statuses.SERVING

    async def check(self, request: Message, _context: RpcContext) -> Message:
        """Return the present status."""
        if request.service not in ("", SERVICE):
            raise ServiceError("NOT_FOUND", f"there is no service {request.service!r} here")
        return health_pb2.HealthCheckResponse(status=self._status())

    async def watch(self, request: Message, _context: RpcContext) -> AsyncIterator[Message]:
        """Yield the present status, and each change."""
        known = request.service in ("", SERVICE)
        last = None
        while True:
            status = self._status() if known else health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
            if status != last:
                last = status
                yield health_pb2.HealthCheckResponse(status=status)
            await asyncio.sleep(_WATCH_INTERVAL_S)


class Reflection:
    """Reflection of the services' messages, for tools that have no description. `descriptor`: the method's."""

    def __init__(self, services: Sequence[str]) -> None:
        self.descriptor: Any = reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"].methods[0]
        self._servicer = reflection.aio.ReflectionServicer(services, pool=POOL)

    async def info(self, requests: AsyncIterator[Any], context: RpcContext) -> AsyncIterator[Message]:
        """Answer each message. Raises DEADLINE_EXCEEDED after a minute, as a stream keeps room for its next message."""
        with interrupted_at(time.monotonic() + _STAYS_S):
            async for answer in self._servicer.ServerReflectionInfo(_messages(requests), context.call):
                yield answer


async def _messages(requests: AsyncIterator[Any]) -> AsyncIterator[Message]:
    async for request in requests:
        if isinstance(request, ServiceError):
            raise request
        yield request
