"""What is known of a request while it is under way: the middleware makes it, routes and service fill it in."""

from __future__ import annotations

from dataclasses import dataclass, field

from app.service import Timings


@dataclass(slots=True)
class RequestContext:
    """`started_s` is the event loop's time of the request's first byte; `model` is set once it is known to exist."""

    request_id: str
    started_s: float
    model: str = ""
    timings: Timings = field(default_factory=Timings)

    def server_timing(self) -> str:
        """The Server-Timing header: milliseconds of each stage."""
        timings = self.timings
        return (
            f"decode;dur={timings.decode_s * 1e3:.3f}, queue;dur={timings.queue_s * 1e3:.3f}, "
            f"infer;dur={timings.infer_s * 1e3:.3f}, post;dur={timings.postprocess_s * 1e3:.3f}"
        )
