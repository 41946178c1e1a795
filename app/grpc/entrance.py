"""Who may call which method: app.access asked for each call of gRPC.

Owns: where a call's caller is found, and that every call is admitted before a message is read. Must not decide who may
what: app.access does.
"""

from __future__ import annotations

import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import grpc

from app.access import audit
from app.access.access import Access, Caller, KeyForbiddenError, caller
from app.access.rules import RPCS, Bind, Need
from app.errors import GRPC_STATUS, ServiceError
from app.grpc.call import CallContext, Message, headers, metadata_headers, peer
from app.grpc.messages import SERVICE
from app.protocols.context import NOBODY

_Request = TypeVar("_Request")


class AdmittedCall:
    """A call that has been admitted; `subject`: what it is about."""

    def __init__(self, caller: Caller) -> None:
        self.caller = caller
        self.subject: dict[str, str] = {}

    def about(self, request: Message) -> None:
        """Note what the audit says of the request."""
        self.subject = {"model": getattr(request, "model_name", "")}


class Door:
    """Of one method, at one bind."""

    def __init__(self, access: Access, need: Need, bind: Bind, name: str) -> None:
        self._access, self._need, self._bind = access, need, bind
        self._action = re.sub(r"^RepositoryModel", "", name).lower()

    def admit(self, call: CallContext) -> Caller:
        """Who calls; `app.access.access.caller` says so as well. Raises FORBIDDEN, UNAUTHORIZED."""
        admitted = self._access.admit(self._need, self._bind, headers(call), peer(call))
        caller.set(admitted)
        return admitted

    @contextmanager
    def recorded(self, call: CallContext) -> Iterator[AdmittedCall]:
        """Admit a call; what administers is written into the audit however it ends."""
        if self._need != "admin":
            yield AdmittedCall(self.admit(call))
            return
        entry = AdmittedCall(NOBODY)
        started_s, outcome = time.monotonic(), "INTERNAL"
        try:
            entry.caller = self.admit(call)
            yield entry
            outcome = "OK"
        except ServiceError as error:
            outcome = error.code
            if isinstance(error, KeyForbiddenError):
                entry.caller = error.caller
            raise
        finally:
            audit.record(
                self._action,
                entry.subject,
                key=entry.caller.key,
                address=peer(call),
                weights_sha256=audit.weights_sha256.get(),
                outcome=outcome,
                seconds=time.monotonic() - started_s,
            )

    async def admitted_each(self, requests: AsyncIterator[_Request], call: CallContext) -> AsyncIterator[_Request]:
        """The messages of a stream, each only while its caller is still admitted. Raises FORBIDDEN, UNAUTHORIZED."""
        async for request in requests:
            self.admit(call)
            yield request


class Entrance:
    """To the methods of our own service, at one bind."""

    def __init__(self, access: Access, bind: Bind) -> None:
        self._access, self._bind = access, bind

    def of(self, name: str) -> Door:
        """To one method."""
        return Door(self._access, RPCS[f"/{SERVICE}/{name}"], self._bind, name)


class Interceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """To the methods of others: health, reflection. Of ours each has a `Door`."""

    def __init__(self, access: Access, bind: Bind) -> None:
        self._access, self._bind = access, bind

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], details: Any) -> Any:
        """The method's handler, or one that refuses. gRPC's metadata does not say where a call comes from."""
        method: str = details.method
        if method.startswith(f"/{SERVICE}/"):
            return await continuation(details)
        handler = await continuation(details)
        if handler is None:
            return None  # There is no such method.
        try:
            self._access.admit(RPCS.get(method, "admin"), self._bind, metadata_headers(details.invocation_metadata), "")
        except ServiceError as error:
            return _refusing(handler, error)
        return handler


def _refusing(handler: Any, error: ServiceError) -> Any:
    async def refuse(_request: Any, call: Any) -> None:
        await call.abort(grpc.StatusCode[GRPC_STATUS[error.code]], error.message, (("code", error.code),))

    async def refuse_stream(_request: Any, call: Any) -> AsyncIterator[Any]:
        await refuse(None, call)
        yield

    make = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }[handler.request_streaming, handler.response_streaming]
    return make(refuse_stream if handler.response_streaming else refuse, handler.request_deserializer)
