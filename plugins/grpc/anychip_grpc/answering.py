"""Frame of each method: count the call, admit its caller, receive its message, hold its answer until it is read.

gRPC reads a message when asked for it, and then all of it. So room for the largest one is taken first, and the excess
is given back when the message is there. A stream keeps that room: its next message may begin at any time. gRPC copies a
message in the event loop once all of it is there, 10 to 30 ms for 18 MB: while messages are large, calls ask for theirs
one after the other, so that the loop does other work between two copies.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass

from anychip_grpc.messages import SERVICE, Message, RawRequest, parsed, raw_form, split
from anychip_grpc.methods import CallContext, RpcContext
from anychip_grpc.relay import Connection, Relay, hold_answer, holding
from app import clock
from app.access.access import Caller
from app.access.rules import Bind, Need
from app.errors import ERRORS, ServiceError, invalid_request, without_frames
from app.ingress.budget import Budget, Lease
from app.ingress.context import Interruption
from app.ingress.converter import Converter
from app.ingress.ingress import Ingress
from app.protocols import wire

_INFERENCE = f"/{SERVICE}/"
NEEDS: dict[str, Need] = {
    **{_INFERENCE + name: "open" for name in ("ServerLive", "ServerReady")},
    **{_INFERENCE + f"Model{name}": "infer" for name in ("Ready", "Metadata", "Config", "Statistics", "Infer")},
    **{_INFERENCE + name: "infer" for name in ("ServerMetadata", "ModelStreamInfer", "RepositoryIndex")},
    **{_INFERENCE + f"RepositoryModel{name}": "admin" for name in ("Load", "Unload")},
    **{f"/grpc.health.v1.Health/{name}": "open" for name in ("Check", "Watch", "List")},
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": "infer",
}
"""Permission that each method needs, by full name; a test compares it with the existing methods."""

OVERHEAD_BYTES = 64 * 1024
"""Bytes of a message beyond the limit max_body_bytes."""
_INLINE_BYTES = 64 * 1024
"""Largest request without its raw tensors that the event loop reads; larger ones are read in another process."""
_RECEIVE_S = 30.0
_LARGE_BYTES = 1024 * 1024
_FORGOTTEN = 0.2
"""Share of its size by which a large message counts less after each later message."""
_TURN_S = 0.02
"""Longest time a call waits alone for its message; after that other calls wait, too."""


class Receiver:
    """Receiver of one server's methods that draw on the same budgets."""

    def __init__(self, largest_bytes: int, converter: Converter, calls: Budget, bodies: Budget) -> None:
        """Keep the budgets. `largest_bytes`: of a message, gRPC's own limit."""
        self._largest_bytes, self._converter, self._calls, self._bodies = largest_bytes, converter, calls, bodies
        self._turn = asyncio.Semaphore(1)
        self._large_of_late_bytes = float(self._largest_bytes)  # The first message may be large.

    def leases(self, caller: Caller) -> tuple[Lease, Lease]:
        """Return the caller's leases of calls and of bytes, as context managers."""
        return self._calls.lease(caller.name), self._bodies.lease(caller.name)

    async def one(self, requests: AsyncIterator[bytes], lease: Lease, kind: Any) -> Message:
        """Receive the only message of a call. Raises ServiceError."""
        with Interruption(deadline_s=clock.monotonic() + _RECEIVE_S):
            # gRPC's own buffers, and the message made of them; if that exceeds one client's limit, the limit.
            room = min(2 * self._largest_bytes, self._bodies.most_for_one)
            await lease.wait(room)
            data = await self._in_turn(requests)
            if data is None:
                raise invalid_request("the call has no message")
            if len(data) <= room:
                lease.give(room - len(data))
            else:
                lease.take(len(data) - room)
        return await self._parsed(data, kind)

    async def _in_turn(self, requests: AsyncIterator[bytes]) -> bytes | None:
        """Return the message, or None if there is none."""
        with contextlib.ExitStack() as turn:
            if self._large_of_late_bytes > _LARGE_BYTES:
                await self._turn.acquire()
                turn.callback(self._turn.release)
                timer = asyncio.get_running_loop().call_later(_TURN_S, turn.close)
                turn.callback(timer.cancel)
            data = await anext(requests, None)
        forgetting = (1 - _FORGOTTEN) * self._large_of_late_bytes
        self._large_of_late_bytes = max(forgetting, len(data or b""))
        return data

    async def each(
        self, requests: AsyncIterator[bytes], lease: Lease, kind: Any
    ) -> AsyncIterator[Message | ServiceError]:
        """Yield the messages of a stream, or an error for each unreadable one. Raises QUEUE_FULL at once."""
        lease.take(min(self._largest_bytes, self._bodies.most_for_one))
        async for data in requests:
            try:
                request = await self._parsed(data, kind)
            except ServiceError as error:
                request = without_frames(error)
            del data
            yield request

    async def _parsed(self, data: bytes, kind: Any) -> Message:
        if kind.DESCRIPTOR.name == "ModelInferRequest":
            return await self._infer_request(data)
        if len(data) > _INLINE_BYTES:
            raise invalid_request(f"the message is larger than the {_INLINE_BYTES} bytes that are read of its kind")
        try:
            return kind.FromString(data)
        except DecodeError:
            raise invalid_request("the message cannot be read") from None

    async def _infer_request(self, data: wire.Buffer) -> RawRequest:
        rest, raw = split(data)
        if len(rest) > _INLINE_BYTES:
            rest, raw = split(await self._converter.convert(raw_form, 0, data))
        if len(rest) > _INLINE_BYTES:
            raise invalid_request(f"without its tensors the request is larger than {_INLINE_BYTES} bytes")
        return parsed(rest, raw)


class Method:
    """A method of a server. `path`: its full name; `handler`: the function that gRPC calls."""

    def __init__(
        self,
        behaviour: Callable[[Any, Any], Any],
        descriptor: Any,
        receiver: Receiver,
        relay: Relay,
        *,
        ingress: Ingress,
        bind: Bind,
    ) -> None:
        """Prepare the handler. `behaviour`: one of Methods; `receiver`: reads its messages; `bind`: which port."""
        self._behaviour, self._kind, self._receiver = behaviour, GetMessageClass(descriptor.input_type), receiver
        self._ingress, self._bind, self._relay = ingress, bind, relay
        self.path = f"/{descriptor.containing_service.full_name}/{descriptor.name}"
        self._need = NEEDS[self.path]
        self._way: Callable[[Any, RpcContext, Connection], Awaitable[Any]] = self._answer
        make = grpc.stream_unary_rpc_method_handler
        if descriptor.server_streaming:
            self._way = self._stream if descriptor.client_streaming else self._watch
            make = grpc.stream_stream_rpc_method_handler
        self.handler = make(self._handled)

    async def _handled(self, requests: Any, call: CallContext) -> Any:
        connection = self._relay.begin(call)
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
