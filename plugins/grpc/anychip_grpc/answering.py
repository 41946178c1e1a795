"""Frame of each method: count the call, admit its caller, receive its message, hold its answer until it is read.

Owns: this order, and turning errors into statuses. Must not know what a method does.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc

from anychip_grpc.call import CallContext, RpcContext
from anychip_grpc.calls import Calls, hold_answer, holding
from anychip_grpc.messages import SERVICE, message_of
from anychip_grpc.receiving import Receiver
from anychip_grpc.relay import Connection
from app.access.rules import Bind, Need
from app.errors import ERRORS, ServiceError, without_frames
from app.ingress.budget import Lease
from app.ingress.ingress import Ingress

_NO_METHOD = "there is no method {} here; shared memory, sequences, tracing and log settings are not offered"

_INFERENCE = f"/{SERVICE}/"
NEEDS: dict[str, Need] = {
    _INFERENCE + "ServerLive": "open",
    _INFERENCE + "ServerReady": "open",
    _INFERENCE + "ModelReady": "infer",
    _INFERENCE + "ServerMetadata": "infer",
    _INFERENCE + "ModelMetadata": "infer",
    _INFERENCE + "ModelConfig": "infer",
    _INFERENCE + "ModelStatistics": "infer",
    _INFERENCE + "ModelInfer": "infer",
    _INFERENCE + "ModelStreamInfer": "infer",
    _INFERENCE + "RepositoryIndex": "infer",
    _INFERENCE + "RepositoryModelLoad": "admin",
    _INFERENCE + "RepositoryModelUnload": "admin",
    "/grpc.health.v1.Health/Check": "open",
    "/grpc.health.v1.Health/Watch": "open",
    "/grpc.health.v1.Health/List": "open",
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": "infer",
}
"""Permission that each method needs, by full name; a test compares it with the existing methods."""


class Method:
    """A method of a server. `path`: its full name; `handler`: the function that gRPC calls."""

    def __init__(
        self,
        behaviour: Callable[[Any, Any], Any],
        descriptor: Any,
        receiver: Receiver,
        calls: Calls,
        *,
        ingress: Ingress,
        bind: Bind,
    ) -> None:
        """Prepare the handler. `behaviour`: the method itself; `receiver`: reads its messages; `bind`: which port."""
        self._behaviour, self._kind, self._receiver = behaviour, message_of(descriptor.input_type), receiver
        self._ingress, self._bind, self._calls = ingress, bind, calls
        self.path = f"/{descriptor.containing_service.full_name}/{descriptor.name}"
        self._need = NEEDS[self.path]
        self._way: Callable[[Any, RpcContext, Connection], Awaitable[Any]] = self._answer
        make = grpc.stream_unary_rpc_method_handler
        if descriptor.server_streaming:
            self._way = self._stream if descriptor.client_streaming else self._watch
            make = grpc.stream_stream_rpc_method_handler
        self.handler = make(self._handled)

    async def _handled(self, requests: Any, call: CallContext) -> Any:
        connection = self._calls.begin(call)
        with RpcContext(self._ingress.link, call, self.path) as context:
            try:
                answer = await self._way(requests, context, connection)
                context.status = 200
                return answer
            except Exception as error:
                failure = context.failure(error)
                context.status = failure.status
        return await refuse(context, failure)  # Counted and in the audit before the client hears of it.

    def _admit(self, context: RpcContext) -> None:
        """Admit the caller. Raises FORBIDDEN, UNAUTHORIZED."""
        context.admit(self._ingress.access, self._need, self._bind)

    async def _answer(self, requests: Any, context: RpcContext, connection: Connection) -> bytes:
        """Answer one message. Administration is refused only after it is read: the audit names its subject."""
        refused = None
        try:
            self._admit(context)
        except ServiceError as error:
            if self._need != "admin":
                raise
            refused = without_frames(error)
        with contextlib.ExitStack() as held:
            calls, lease = map(held.enter_context, self._receiver.leases(context.caller))
            try:
                calls.take(1)
                request = await self._receiver.one(requests, lease, self._kind)
            except ServiceError as error:
                raise refused or error from None
            if self._need == "admin":
                context.subject = {"model": request.model_name}
            if refused is not None:
                raise refused
            answer = _serialized(await self._behaviour(request, context))
            hold_answer(connection, len(answer), lease, held)
            return answer

    async def _watch(self, requests: Any, context: RpcContext, connection: Connection) -> None:
        """Read one message, and answer until the client leaves."""
        self._admit(context)
        calls, lease = self._receiver.leases(context.caller)
        with calls, lease:
            calls.take(1)
            request = await self._receiver.one(requests, lease, self._kind)
            lease.give(lease.held_bytes)
            await _send(self._behaviour(request, context), context.call, connection, lease)

    async def _stream(self, requests: Any, context: RpcContext, connection: Connection) -> None:
        """Answer each message, while its caller is still admitted: a key may be revoked."""
        self._admit(context)
        calls, lease = self._receiver.leases(context.caller)

        async def admitted() -> AsyncIterator[Any]:
            async for request in self._receiver.each(requests, lease, self._kind):
                self._admit(context)
                yield request

        with calls, lease:
            calls.take(1)
            await _send(self._behaviour(admitted(), context), context.call, connection, lease)


async def _send(answers: AsyncIterator[Any], call: CallContext, connection: Connection, lease: Lease) -> None:
    """Send each answer after the client has read those before it."""
    async for answer in answers:
        data = _serialized(answer)
        with holding(connection, len(data), lease):
            await call.write(data)


def _serialized(answer: Any) -> bytes:
    """Serialise an answer; tensors are serialised where they are made, large ones not in the event loop."""
    return answer if isinstance(answer, bytes) else answer.SerializeToString()


async def refuse(context: RpcContext, error: ServiceError) -> None:
    """End a call with an error's status, its sentence, and its code beside it."""
    trailing = [("x-request-id", context.request_id), ("code", error.code)]
    if error.retry_after_s is not None:
        trailing.append(("retry-after", str(error.retry_after_s)))
    with contextlib.suppress(grpc.aio.InternalError):  # The client has gone meanwhile.
        await context.call.abort(grpc.StatusCode[ERRORS[error.code].grpc], error.message, tuple(trailing))


def unknown(calls: Calls, path: str) -> Any:
    """Return the handler of an unknown method."""

    async def refused(_requests: Any, call: CallContext) -> None:
        calls.begin(call)
        await call.abort(grpc.StatusCode.UNIMPLEMENTED, _NO_METHOD.format(path[:128]))

    return grpc.stream_stream_rpc_method_handler(refused)
