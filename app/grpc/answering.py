"""Around each method: the call is counted, its caller admitted, its message received, its answer held until it is read.

Owns: this order, and turning errors into statuses. Must not know what a method does.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc

from app import logs
from app.errors import ERRORS, ServiceError, internal_error, without_frames
from app.grpc.call import CallContext, scope_of
from app.grpc.calls import Calls, hold_answer, holding
from app.grpc.entrance import MethodGuard
from app.grpc.receiving import Receiver
from app.grpc.relay import Connection
from app.ingress.budget import Lease
from app.ingress.context import begin_request, end_request
from app.link import Link

log = logging.getLogger("anychip.rpc")


class Method:
    """Of one server."""

    def __init__(
        self,
        behaviour: Callable[[Any, Any], Any],
        kind: type[Any],
        receiver: Receiver,
        guard: MethodGuard,
        calls: Calls,
    ) -> None:
        """`behaviour`: what it does; `kind`: of its messages; `receiver`: reads them."""
        self._behaviour, self._kind, self._receiver, self._guard, self._calls = behaviour, kind, receiver, guard, calls

    def handler(self, descriptor: Any, link: Link) -> Any:
        """What gRPC calls. `descriptor`: the method's."""
        make = grpc.stream_unary_rpc_method_handler
        behaviour: Callable[[Any, CallContext, Connection], Awaitable[Any]] = self._answer
        if descriptor.server_streaming:
            make = grpc.stream_stream_rpc_method_handler
            behaviour = self._stream if descriptor.client_streaming else self._watch
        path = f"/{descriptor.containing_service.full_name}/{descriptor.name}"

        async def handled(requests: Any, call: CallContext) -> Any:
            connection = self._calls.begin(call)
            try:
                return await behaviour(requests, call, connection)
            except ServiceError as error:
                failure = without_frames(error)
            except Exception:
                log.exception("%s failed", path)
                failure = internal_error()
            return await refuse(link, path, call, failure)

        return make(handled)

    async def _answer(self, requests: Any, call: CallContext, connection: Connection) -> bytes:
        """One message, one answer."""
        with self._guard.recorded(call) as entry, contextlib.ExitStack() as held:
            calls, lease = map(held.enter_context, self._receiver.leases(entry.caller))
            try:
                calls.take(1)
                request = await self._receiver.one(requests, lease, self._kind)
                entry.about(request)
            except ServiceError as error:
                raise entry.refused or error from None
            if entry.refused is not None:
                raise entry.refused
            answer = _serialized(await self._behaviour(request, call))
            hold_answer(connection, len(answer), lease, held)
            return answer

    async def _watch(self, requests: Any, call: CallContext, connection: Connection) -> None:
        """One message, and answers until the client leaves."""
        calls, lease = self._receiver.leases(self._guard.admit(call))
        with calls, lease:
            calls.take(1)
            request = await self._receiver.one(requests, lease, self._kind)
            lease.give(lease.held_bytes)
            await _send(self._behaviour(request, call), call, connection, lease)

    async def _stream(self, requests: Any, call: CallContext, connection: Connection) -> None:
        """An answer to each message."""
        calls, lease = self._receiver.leases(self._guard.admit(call))
        with calls, lease:
            calls.take(1)
            # Whoever may begin a stream may not go on when its key is gone.
            still_admitted = self._guard.admitted_each(self._receiver.each(requests, lease, self._kind), call)
            await _send(self._behaviour(still_admitted, call), call, connection, lease)


async def _send(answers: AsyncIterator[Any], call: CallContext, connection: Connection, lease: Lease) -> None:
    """Each when the client has read those before it."""
    async for answer in answers:
        data = _serialized(answer)
        with holding(connection, len(data), lease):
            await call.write(data)


def _serialized(answer: Any) -> bytes:
    """Tensors are serialised where they are made: large ones not in the event loop."""
    return answer if isinstance(answer, bytes) else answer.SerializeToString()


async def refuse(link: Link, path: str, call: CallContext, error: ServiceError) -> None:
    """End a call with an error's status, its sentence, and its code beside it; counted, unless it has been."""
    if not logs.request_id.get():
        scope = scope_of(call, path)
        context = begin_request(link, scope)
        context.route = path
        end_request(link, scope, context, error.status, error.code)
    trailing = [("x-request-id", logs.request_id.get()), ("code", error.code)]
    if error.retry_after_s is not None:
        trailing.append(("retry-after", str(error.retry_after_s)))
    with contextlib.suppress(grpc.aio.InternalError):  # The client has gone meanwhile.
        await call.abort(grpc.StatusCode[ERRORS[error.code].grpc], error.message, tuple(trailing))


def unknown(calls: Calls) -> Any:
    """The handler of methods that there are not."""

    async def refused(_requests: Any, call: CallContext) -> None:
        calls.begin(call)
        await call.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")

    return grpc.stream_stream_rpc_method_handler(refused)
