"""What is known of a request while it is under way: the middleware makes it, routes and service fill it in."""

from __future__ import annotations

from dataclasses import dataclass, field

from app.service import Timings


@dataclass(slots=True)
class RequestContext:
    """`started_s` is `time.monotonic()` at the request's first byte; `model` is set once it is known to exist."""

    request_id: str
    started_s: float
    model: str = ""
    timings: Timings = field(default_factory=Timings)
