"""A request from its first byte to its end: its id, its trace, and what is counted of it.

Owns: what HTTP and gRPC have in common around an answer. Must not know what a request asks for.
"""

from __future__ import annotations

import logging
import random
import re
import time
from collections.abc import Iterable, MutableMapping
from dataclasses import dataclass, field
from typing import Any

from app import logs
from app.access.access import Caller
from app.access.keys import CallerLimits
from app.ingress.budget import Budget, Lease
from app.link import Link
from app.observability.metrics import MODELLESS
from app.observability.tracing import TRACEPARENT, RequestTrace
from app.serving.recorder import Recorder

log = logging.getLogger("anychip")

Scope = MutableMapping[str, Any]
"""Of ASGI's scope `method`, `path`, `headers` and `client` matter here: a gRPC call has them, too."""

_RANDOM = random.Random()  # An id need not be hard to guess, and the system's randomness costs ten times as much.
NOBODY = Caller("", CallerLimits())

UNCOUNTED_BYTES = 64 * 1024
"""An answer of so many bytes is not counted: each connection may have as much on its way."""

_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,128}")


@dataclass(slots=True)
class RequestContext:
    """`started_s` is `time.monotonic()` at the request's first byte; `address` is where it came from; `caller` is set
    once it has been admitted, `model` once it is known to exist; `route` is the path with names for its parts;
    `traceparent`: what goes on from here; `weights_sha256`: of what a load has loaded; `unsent`: what a large answer
    holds.
    """

    request_id: str
    started_s: float
    address: str = ""
    caller: Caller = NOBODY
    model: str = ""
    route: str = ""
    recorder: Recorder = field(default_factory=Recorder)
    traceparent: bytes = b""
    weights_sha256: str = ""
    unsent: Lease | None = None

    def hold(self, size: int, bodies: Budget) -> None:
        """Count an answer of so many bytes, what was counted of it before included, until `let_go`.

        Raises QUEUE_FULL.
        """
        if size > UNCOUNTED_BYTES:
            if self.unsent is None:
                self.unsent = bodies.lease(self.caller.name)
            self.unsent.take(max(0, size - self.unsent.held_bytes))

    def let_go(self) -> None:
        """The answer has been sent, or nobody is left to read it."""
        if self.unsent is not None:
            self.unsent.__exit__(None, None, None)
            self.unsent = None

    def follow(self, headers: Iterable[tuple[bytes, bytes]], trace: RequestTrace | None) -> None:
        """Go on with our own trace, else with the client's: its id still finds the request in its own traces."""
        self.recorder.trace = trace
        if trace is not None:
            self.traceparent = trace.traceparent.encode()
            self.recorder.exemplar = {"trace_id": trace.trace_id}
            return
        given = _first(headers, b"traceparent")
        if given and (found := TRACEPARENT.fullmatch(given)):
            self.traceparent = given
            if int(found[2], 16) & 1:  # Recorded by whoever asked.
                self.recorder.exemplar = {"trace_id": found[1].decode()}

    def attributes(self) -> dict[str, str]:
        """What a trace says of the request; only what is known."""
        known = {"anychip.request_id": self.request_id, "http.route": self.route, "anychip.model": self.model}
        return {name: value for name, value in known.items() if value}


def begin_request(link: Link, scope: Scope) -> RequestContext:
    """What is known of a request at its first byte. From here on the log lines of this task name it."""
    client = scope.get("client")
    context = RequestContext(request_id(scope["headers"]), time.monotonic(), str(client[0]) if client else "")
    tracing = link.tracing
    context.follow(scope["headers"], tracing.request(scope, context.started_s) if tracing else None)
    logs.request_id.set(context.request_id)
    exemplar = context.recorder.exemplar
    logs.trace_id.set(exemplar["trace_id"] if exemplar else "")
    return context


def end_request(link: Link, scope: Scope, context: RequestContext, status: int, code: str) -> None:
    """Count, trace and, where that is wanted, log the request. `status`: HTTP's, 0 where nobody was left to answer."""
    seconds = time.monotonic() - context.started_s
    recorder = context.recorder
    if context.model:
        link.count(context.model, code, seconds, recorder.exemplar)
    elif code in MODELLESS:
        link.metrics.requests.labels("", code).inc()
    if recorder.trace is not None:
        recorder.trace.end(f"{scope['method']} {context.route}".rstrip(), status, code)
    if link.settings.log_requests:
        # Without the query: it is the client's, and may hold what nobody should read.
        fields = {"method": scope["method"], "path": scope["path"], "status": status, "code": code}
        fields |= {"ms": round(seconds * 1e3, 3)}
        log.info("request", extra={"fields": fields})


def request_id(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """The client's, where it sends one that can be trusted, else a new one."""
    given = _first(headers, b"x-request-id")
    return given.decode() if given and _REQUEST_ID.fullmatch(given) else f"{_RANDOM.getrandbits(64):016x}"


def _first(headers: Iterable[tuple[bytes, bytes]], wanted: bytes) -> bytes:
    """The value of the first header of this name, empty without one."""
    for name, value in headers:
        if name == wanted:
            return value
    return b""
