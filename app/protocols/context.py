"""What is known of a request while it is under way: the middleware makes it, routes and service fill it in."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from app.observability.metrics import Exemplar
from app.observability.tracing import TRACEPARENT, RequestTrace
from app.serving.timings import Timings


@dataclass(slots=True)
class RequestContext:
    """`started_s` is `time.monotonic()` at the request's first byte; `model` is set once it is known to exist; `route`
    is the path with names for its parts. `trace`: where it is recorded here; `traceparent`: what goes on from here.
    """

    request_id: str
    started_s: float
    model: str = ""
    timings: Timings = field(default_factory=Timings)
    route: str = ""
    trace: RequestTrace | None = None
    traceparent: bytes = b""
    exemplar: Exemplar | None = None

    def follow(self, headers: Iterable[tuple[bytes, bytes]], trace: RequestTrace | None) -> None:
        """Go on with our own trace, else with the client's: its id still finds the request in its own traces."""
        self.trace = trace
        if trace is not None:
            self.traceparent = trace.traceparent.encode()
            self.exemplar = {"trace_id": trace.trace_id}
            return
        given = next((value for name, value in headers if name == b"traceparent"), b"")
        if found := TRACEPARENT.fullmatch(given):
            self.traceparent = given
            if int(found[2], 16) & 1:  # Recorded by whoever asked.
                self.exemplar = {"trace_id": found[1].decode()}

    def attributes(self) -> dict[str, str]:
        """What a trace says of the request; only what is known."""
        known = {"anychip.request_id": self.request_id, "http.route": self.route, "anychip.model": self.model}
        return {name: value for name, value in known.items() if value}
