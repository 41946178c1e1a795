"""Who may call which method: app.access asked for each call of gRPC.

Owns: where a call's caller is found, and that every call is admitted before a message is read. Must not decide who may
what: app.access does.
"""

from __future__ import annotations

import re
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import TypeVar

from app.access import audit
from app.access.access import Access, Caller, KeyForbiddenError, caller
from app.access.addresses import client_of
from app.access.rules import RPCS, Bind
from app.errors import ServiceError
from app.grpc.call import CallContext, Message, headers, peer
from app.ingress.context import NOBODY

_Request = TypeVar("_Request")


class RecordedCall:
    """A call that has been admitted, or `refused`; `subject`: what it is about."""

    def __init__(self, caller: Caller) -> None:
        self.caller = caller
        self.subject: dict[str, str] = {}
        self.refused: ServiceError | None = None

    def about(self, request: Message) -> None:
        """Note what the audit says of the request."""
        self.subject = {"model": getattr(request, "model_name", "")}


class MethodGuard:
    """Of one method (its full name), at one bind."""

    def __init__(self, access: Access, bind: Bind, method: str) -> None:
        self._access, self._need, self._bind = access, RPCS[method], bind
        self._action = re.sub(r"^.*/(RepositoryModel)?", "", method).lower()

    def admit(self, call: CallContext) -> Caller:
        """Who calls; `app.access.access.caller` says so as well. Raises FORBIDDEN, UNAUTHORIZED."""
        admitted = self._access.admit(self._need, self._bind, headers(call), peer(call))
        caller.set(admitted)
        return admitted

    @contextmanager
    def recorded(self, call: CallContext) -> Iterator[RecordedCall]:
        """Admit a call; what administers is written into the audit however it ends.

        That has not ended when it is refused: its message says what it is about. Raises FORBIDDEN, UNAUTHORIZED.
        """
        if self._need != "admin":
            yield RecordedCall(self.admit(call))
            return
        entry = RecordedCall(NOBODY)
        started_s, outcome = time.monotonic(), "INTERNAL"
        try:
            try:
                entry.caller = self.admit(call)
            except ServiceError as error:
                entry.caller, entry.refused = Caller(client_of(peer(call)), NOBODY.limits), error
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
