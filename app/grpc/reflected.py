"""Server reflection: what the services' messages look like, for tools that have no description of them.

Owns: what grpcio-reflection leaves open: how long a stream may stay.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from grpc_reflection.v1alpha import reflection, reflection_pb2

from app.errors import ServiceError
from app.grpc.call import Message, RpcContext
from app.grpc.messages import POOL
from app.ingress.interrupt import interrupted_at

_STAYS_S = 60.0


class Reflection:
    """Of one server. `descriptor`: the method's."""

    def __init__(self, services: Sequence[str]) -> None:
        self.descriptor: Any = reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"].methods[0]
        self._servicer = reflection.aio.ReflectionServicer(services, pool=POOL)

    async def info(self, requests: AsyncIterator[Any], context: RpcContext) -> AsyncIterator[Message]:
        """An answer to each. Raises DEADLINE_EXCEEDED after a minute: a stream keeps room for its next message."""
        with interrupted_at(time.monotonic() + _STAYS_S):
            async for answer in self._servicer.ServerReflectionInfo(_messages(requests), context.call):
                yield answer


async def _messages(requests: AsyncIterator[Any]) -> AsyncIterator[Message]:
    async for request in requests:
        if isinstance(request, ServiceError):
            raise request
        yield request
