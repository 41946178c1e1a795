"""Context of a request from its first byte to its end: id, trace, caller, result, metrics, and its interruptions.

Owns: the steps around an answer that HTTP (app.http.edge, app.http.hot) and gRPC have in common, and cancelling its
task with a reason: a deadline, a slow body, a client that leaves, a shutdown. Must not know what a request asks for.
"""

from __future__ import annotations

import asyncio
import logging
import random
import re
from collections.abc import Callable, Mapping, MutableMapping
from types import TracebackType
from typing import Any, TypeVar

from app import clock, logs
from app.access import audit
from app.access.access import Access, Caller, KeyForbiddenError, client_of
from app.access.keys import CallerLimits
from app.access.rules import Bind, Need, administered, check_spelling
from app.errors import ClientLeftError, ServiceError, internal_error, without_frames
from app.ingress.budget import Budget, Lease
from app.ingress.sending import STOOD_STILL_S
from app.link import Link, ServedModel
from app.observability.metrics import MODELLESS, Recorder
from app.observability.tracing import TRACEPARENT, RequestTrace

_FREE_S = 5.0  # An upload may take this long at any rate.


class Interruption:
    """Context within which its task may be interrupted, with a reason; `among` holds it for as long.

    It raises DEADLINE_EXCEEDED at `deadline_s` (`time.monotonic()`), if there is one. It raises REQUEST_TIMEOUT earlier
    if a body that has begun to arrive is slower than `least_bytes_per_s`, if that is set. (Nothing is held for a body
    that has not begun.)
    """

    __slots__ = ("_among", "_began_s", "_deadline_s", "_due_s", "_reason", "_timer", "least_bytes_per_s", "task")

    def __init__(
        self,
        task: asyncio.Task[Any] | None = None,
        *,
        deadline_s: float | None = None,
        among: set[Interruption] | None = None,
    ) -> None:
        """Take `task`, the running one, from the caller: before Python 3.12 finding it costs a system call."""
        running = task or asyncio.current_task()
        assert running is not None
        self.task, self._among, self._deadline_s = running, among, deadline_s
        self.least_bytes_per_s = 0
        self._reason: Exception | None = None
        self._timer: asyncio.Handle | None = None

    def __enter__(self) -> Interruption:
        if self._among is not None:
            self._among.add(self)
        if self._deadline_s is not None:
            self._began_s = clock.monotonic()
            # Mostly all is there: a timer is only set for what still waits after this turn of the loop.
            self._timer = self.task.get_loop().call_soon(self._arm_deadline)
        return self

    def interrupt(self, reason: Exception) -> None:
        """Cancel the task inside; the context then raises `reason`."""
        self._reason = reason
        self.task.cancel()

    def arrived(self, size: int) -> None:
        """Note that so many bytes of the body have arrived, and more will come."""
        if self.least_bytes_per_s:
            self._arm_rate(self._began_s + _FREE_S + size / self.least_bytes_per_s)

    def arrived_wholly(self) -> None:
        """Note that the whole body has arrived."""
        self._arm_deadline()

    def _arm_deadline(self) -> None:
        assert self._deadline_s is not None
        self._arm(self._deadline_s, self._too_late)

    def _arm_rate(self, due_s: float) -> None:
        assert self._deadline_s is not None
        self._due_s = max(due_s, clock.monotonic())  # A body that is too slow already is not late.
        self._arm(min(due_s, self._deadline_s), self._too_slow if due_s < self._deadline_s else self._too_late)

    def _arm(self, at_s: float, function: Callable[[], None]) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self.task.get_loop().call_later(max(0.0, at_s - clock.monotonic()), function)

    def _too_late(self) -> None:
        self.interrupt(ServiceError("DEADLINE_EXCEEDED", "the deadline passed before the body had arrived"))

    def _too_slow(self) -> None:
        now_s = clock.monotonic()
        if now_s - self._due_s > STOOD_STILL_S:
            self._arm_rate(now_s + _FREE_S)
            return
        self.interrupt(ServiceError("REQUEST_TIMEOUT", "the body comes too slowly"))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._among is not None:
            self._among.discard(self)
        reason, self._reason = self._reason, None
        if reason is not None and kind is asyncio.CancelledError:
            taken_back(self.task)
            try:
                raise reason from None
            finally:
                del reason  # Else the error and this frame, and all that called it, would hold each other.


def taken_back(task: asyncio.Task[Any]) -> None:
    """Take back the cancellation of a task that was only an interruption: the task goes on."""
    if hasattr(task, "uncancel"):  # Since Python 3.11 a task counts its cancellations.
        task.uncancel()


async def ended_before(task: asyncio.Future[Any], hurry: asyncio.Event) -> bool:
    """Wait for a task to end, until there is a hurry; return True if it has ended. It is not cancelled."""
    hurried = asyncio.ensure_future(hurry.wait())
    try:
        await asyncio.wait((task, hurried), return_when=asyncio.FIRST_COMPLETED)
    finally:
        hurried.cancel()
    return task.done()


log = logging.getLogger("anychip")

Scope = MutableMapping[str, Any]
"""ASGI's scope, of which `method`, `path`, `headers` and `client` are read: a gRPC call has them, too."""

_RANDOM = random.Random()  # An id need not be hard to guess, and the system's randomness costs ten times as much.
UNKNOWN = Caller("", CallerLimits())

UNCOUNTED_BYTES = 64 * 1024
"""Most bytes of an answer that is not counted: each connection may have as much in flight."""

_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,128}")


_Context = TypeVar("_Context", bound="RequestContext")


class RequestContext:
    """Context of a request; at its end the request is counted, traced, logged and audited.

    `started_s`: `time.monotonic()` at its first byte; `address`: the client's; `caller`: set after admission; `model`:
    set once it is known to exist, with `served`, for which it counts; `route`: the path with names for its parts;
    `status`: HTTP's, set when an answer begins, 0 without one; `code`: "OK" or an error's; `traceparent`: the header
    for the answer and later calls; `subject` and `weights_sha256`: for the audit; `unsent`: the lease of a large
    answer; `task`: the task that answers it, if known.
    """

    __slots__ = (
        "_link",
        "_need",
        "address",
        "caller",
        "code",
        "model",
        "recorder",
        "request_id",
        "route",
        "scope",
        "served",
        "started_s",
        "status",
        "subject",
        "task",
        "traceparent",
        "unsent",
        "weights_sha256",
    )

    def __init__(self, link: Link, scope: Scope) -> None:
        """Begin a request: from here on the log lines of this task name it, and until its end the scope has it."""
        self.started_s = clock.monotonic()
        self._link, self.scope = link, scope
        scope["anychip"] = self
        headers, client = scope["headers"], scope.get("client")
        sent_id = traceparent = b""
        for name, value in headers:
            if name == b"x-request-id":
                sent_id = sent_id or value
            elif name == b"traceparent":
                traceparent = traceparent or value
        # The client's, where it sends one that can be trusted.
        trusted = sent_id and _REQUEST_ID.fullmatch(sent_id)
        self.request_id = sent_id.decode() if trusted else f"{_RANDOM.getrandbits(64):016x}"
        self.address = str(client[0]) if client else ""
        self.caller = UNKNOWN
        self.model = self.route = self.weights_sha256 = ""
        self.served: ServedModel | None = None
        self.status, self.code = 0, "OK"
        self.recorder = Recorder()
        self.traceparent = b""
        self.subject: Mapping[str, str] = {}
        self.unsent: Lease | None = None
        self.task: asyncio.Task[None] | None = None
        self._need: Need = "open"
        tracing = link.tracing
        if tracing or traceparent:
            self._follow(traceparent, tracing.request(scope, self.started_s) if tracing else None)
        logs.request_id.set(self.request_id)
        exemplar = self.recorder.exemplar
        logs.trace_id.set(exemplar["trace_id"] if exemplar else "")

    def admit(self, access: Access, need: Need, bind: Bind) -> None:
        """Identify the caller, and check its rights. Raises NOT_FOUND, FORBIDDEN, UNAUTHORIZED."""
        self._need = need
        if raw_path := self.scope.get("raw_path"):
            check_spelling(raw_path)
        try:
            self.caller = access.admit(need, bind, self.scope["headers"], self.address)
        except ServiceError as error:
            key = error.key if isinstance(error, KeyForbiddenError) else ""
            self.caller = Caller(client_of(self.address), UNKNOWN.limits, key)
            raise

    def choose(self, name: str, version: str = "") -> ServedModel:
        """Choose the model that answers, as `Link.choose` says, and count the request for it: for its version, and two
        stages under their own name. Raises MODEL_NOT_FOUND.
        """
        served = self.served = self._link.choose(name, version)
        self.model = served.model.name if name in self._link.models else name
        return served

    def hold(self, size: int, bodies: Budget) -> None:
        """Count an answer of more than UNCOUNTED_BYTES in total until the end of the request. Raises QUEUE_FULL."""
        if self.unsent is None:
            self.unsent = bodies.lease(self.caller.name)
        self.unsent.take(max(0, size - self.unsent.held_bytes))

    def failure(self, error: Exception) -> ServiceError:
        """Return the error for the client; log the detail of an internal one.

        Raises ClientLeftError if the client has left.
        """
        if isinstance(error, ClientLeftError):
            try:
                raise error
            finally:
                del error  # Else the error and this frame, and all that called it, would hold each other.
        if not isinstance(error, ServiceError):
            log.error("the request failed", exc_info=error)
            error = internal_error()
        self.code = error.code
        return without_frames(error)

    def attributes(self) -> dict[str, str]:
        """Return the request's known attributes for a trace."""
        known = {"anychip.request_id": self.request_id, "http.route": self.route, "anychip.model": self.model}
        return {name: value for name, value in known.items() if value} | {"anychip.code": self.code}

    def __enter__(self: _Context) -> _Context:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        left = kind is ClientLeftError
        if kind is not None and self.code == "OK":
            self.code = "CANCELLED" if left or kind is asyncio.CancelledError else "INTERNAL"
        self._record(clock.monotonic() - self.started_s)
        if self.unsent is not None:
            self.unsent.__exit__()
        # Under a flood, the garbage of thousands of requests would stop the event loop for a tenth of a second.
        del self.scope["anychip"]
        return left  # The request ends here: no client waits for an answer.

    def _record(self, seconds: float) -> None:
        link, scope, code = self._link, self.scope, self.code
        if self.served is not None:
            link.count(self.served, code, seconds, self.recorder)
        elif code in MODELLESS:
            link.metrics.requests.labels("", code).inc()
        if self._need != "open":
            link.metrics.clients.count(self.caller.name, refused=code not in ("OK", "CANCELLED"))
        if self.recorder.trace is not None:
            name = f"{scope['method']} {self.route}".rstrip()
            self.recorder.trace.end(name, self.status, code, self.attributes())
        if link.settings.log_requests:
            # Without the query: it is the client's, and may hold what must not be in a log.
            fields = {"method": scope["method"], "path": scope["path"], "status": self.status, "code": code}
            log.info("request", extra={"fields": fields | {"ms": round(seconds * 1e3, 3)}})
        if self._need == "admin":
            action, subject = administered(scope["path"])
            audit.record(
                action,
                {**subject, **self.subject},
                key=self.caller.key,
                address=self.address,
                weights_sha256=self.weights_sha256,
                outcome=code,
                seconds=seconds,
            )

    def _follow(self, given: bytes, trace: RequestTrace | None) -> None:
        """Follow our own trace, else the client's: its id still finds the request in the client's traces."""
        self.recorder.trace = trace
        if trace is not None:
            self.traceparent = trace.traceparent.encode()
            self.recorder.exemplar = {"trace_id": trace.trace_id}
            return
        if given and (found := TRACEPARENT.fullmatch(given)):
            self.traceparent = given
            if int(found[2], 16) & 1:  # The client records it.
                self.recorder.exemplar = {"trace_id": found[1].decode()}
