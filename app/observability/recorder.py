"""Records of a request: the seconds of each stage, its spans, its counts.

Owns: the stages of a request, and where each is written: metrics, Triton's statistics, the Server-Timing header. Must
not decide anything: the flow of a request (app.ingress.items) reads the same without it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from app.errors import ClientLeftError, ServiceError
from app.observability.metrics import Exemplar, ModelMetrics
from app.observability.tracing import RequestTrace
from app.observability.triton_statistics import ModelStatistics


@dataclass(slots=True)
class Recorder:
    """Recorder of one request. `trace`: the owner of its spans; `exemplar`: the label of its measurements.

    `seconds`: of each stage; with several images, of the slowest. `abandoned`: the client has left, so later
    cancellations count as its doing.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    trace: RequestTrace | None = None
    exemplar: Exemplar | None = None
    abandoned: bool = False

    def timings(self) -> str:
        """Return the Server-Timing header: milliseconds of each stage."""
        taken = self.seconds.get
        return (
            f"decode;dur={taken('decode', 0.0) * 1e3:.3f}, queue;dur={taken('queue', 0.0) * 1e3:.3f}, "
            f"infer;dur={taken('infer', 0.0) * 1e3:.3f}, post;dur={taken('postprocess', 0.0) * 1e3:.3f}"
        )

    def abandon(self) -> None:
        """Note that the client has left."""
        self.abandoned = True

    def upload_failed(self, metrics: ModelMetrics, error: ServiceError | ClientLeftError) -> None:
        """Count a body that has not arrived. Other errors of it count as the request's outcome alone."""
        if isinstance(error, ClientLeftError):
            metrics.cancelled["upload"].inc()
        elif error.code in ("DEADLINE_EXCEEDED", "REQUEST_TIMEOUT"):
            metrics.expired["upload"].inc()
        elif error.code == "QUEUE_FULL":
            metrics.rejected["buffer_full"].inc()

    def image(
        self, metrics: ModelMetrics, statistics: ModelStatistics, seconds: Mapping[str, float], slack_s: float
    ) -> None:
        """Record an answered item, with its seconds in each stage and its time to the deadline."""
        for stage, taken in seconds.items():
            metrics.stage_seconds[stage].observe(taken, self.exemplar)
        metrics.deadline_slack.observe(slack_s)
        statistics.images += 1
        self._include(seconds)

    def collected(self, metrics: ModelMetrics, seconds: float) -> None:
        """Record the seconds of a request's answer if its items have none of their own."""
        metrics.stage_seconds["postprocess"].observe(seconds)
        self._include({"postprocess": seconds})

    def _include(self, seconds: Mapping[str, float]) -> None:
        if not self.seconds:
            self.seconds.update(seconds)
            return
        for stage, taken in seconds.items():
            self.seconds[stage] = max(taken, self.seconds.get(stage, 0.0))
