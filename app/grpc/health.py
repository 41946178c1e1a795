"""grpc.health.v1, for the server ("") and the inference service: serving while every model has a worker.

Owns: what it answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from grpc_health.v1 import health_pb2

from app.errors import ServiceError
from app.grpc.call import Message, RpcContext
from app.grpc.messages import SERVICE
from app.link import Administration

DESCRIPTOR: Any = health_pb2.DESCRIPTOR.services_by_name["Health"]

_WATCH_INTERVAL_S = 0.5


class Health:
    """Of one service."""

    def __init__(self, administration: Administration) -> None:
        self._administration = administration

    def _status(self) -> Any:
        statuses = health_pb2.HealthCheckResponse
        return statuses.NOT_SERVING if self._administration.why_not() else statuses.SERVING

    async def check(self, request: Message, _context: RpcContext) -> Message:
        """The status now."""
        if request.service not in ("", SERVICE):
            raise ServiceError("NOT_FOUND", f"there is no service {request.service!r} here")
        return health_pb2.HealthCheckResponse(status=self._status())

    async def watch(self, request: Message, _context: RpcContext) -> AsyncIterator[Message]:
        """The status now, and whenever it is another."""
        known = request.service in ("", SERVICE)
        last = None
        while True:
            status = self._status() if known else health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
            if status != last:
                last = status
                yield health_pb2.HealthCheckResponse(status=status)
            await asyncio.sleep(_WATCH_INTERVAL_S)
