"""What a request leaves behind: how long each stage took, its spans, its counts.

Owns: the stages of a request and of its items, and where each is written: metrics, Triton's statistics, spans, the
Server-Timing header. Must not decide anything: the flow (app.serving.items) reads the same without it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING

from app.errors import ClientLeftError, ServiceError
from app.fleet.outcome import Outcome, Pending, too_late
from app.link import ServedModel
from app.observability.metrics import Exemplar
from app.observability.tracing import RequestTrace
from app.scheduling.queue import Item

if TYPE_CHECKING:
    from opentelemetry.trace import SpanContext


@dataclass(slots=True)
class Timings:
    """Seconds of each stage; of several images, those of the slowest."""

    seconds: dict[str, float] = field(default_factory=dict)

    def header(self) -> str:
        """The Server-Timing header: milliseconds of each stage."""
        taken = self.seconds.get
        return (
            f"decode;dur={taken('decode', 0.0) * 1e3:.3f}, queue;dur={taken('queue', 0.0) * 1e3:.3f}, "
            f"infer;dur={taken('infer', 0.0) * 1e3:.3f}, post;dur={taken('postprocess', 0.0) * 1e3:.3f}"
        )

    def include(self, seconds: Mapping[str, float]) -> None:
        """Take in another image's stages."""
        if not self.seconds:
            self.seconds.update(seconds)
            return
        for stage, taken in seconds.items():
            self.seconds[stage] = max(taken, self.seconds.get(stage, 0.0))


@dataclass(slots=True)
class Recorder:
    """Records one request. `trace`: where its spans go; `exemplar`: what its measurements are labelled with.

    `abandoned`: the client has left, so that what is cancelled from now on counts as its doing.
    """

    timings: Timings = field(default_factory=Timings)
    trace: RequestTrace | None = None
    exemplar: Exemplar | None = None
    abandoned: bool = False

    def abandon(self) -> None:
        """The client has left."""
        self.abandoned = True

    def uploaded(self, served: ServedModel, seconds: float) -> None:
        """The body has arrived, so long after the first byte."""
        served.metrics.stage_seconds["upload"].observe(seconds, self.exemplar)

    def upload_failed(self, served: ServedModel, error: ServiceError | ClientLeftError) -> None:
        """The body has not arrived. What else is wrong with it is counted as the request's outcome alone."""
        if isinstance(error, ClientLeftError):
            served.metrics.cancelled["upload"].inc()
        elif error.code in ("DEADLINE_EXCEEDED", "REQUEST_TIMEOUT"):
            served.metrics.expired["upload"].inc()
        elif error.code == "QUEUE_FULL":
            served.metrics.rejected["buffer_full"].inc()

    def item(self, served: ServedModel, position: int, deadline_s: float) -> ItemRecorder:
        """Records the item at this position of the request, from now on; a context manager around its work."""
        return ItemRecorder(self, served, position, deadline_s)

    def collected(self, served: ServedModel, seconds: float) -> None:
        """A request's answer was put together in so many seconds, where its items have none of their own."""
        served.metrics.stage_seconds["postprocess"].observe(seconds)
        served.statistics.stages["postprocess"].add(seconds)
        self.timings.include({"postprocess": seconds})


class ItemRecorder:
    """Records one image, or one row of tensors: decode until `queued`, queue and infer until `computed`, then the rest.

    What it measures is written when its context ends without an error; spans are written in any case.
    """

    __slots__ = ("_batch", "_begun", "_deadline_s", "_item", "_position", "_request", "_seconds", "_served", "_stage")

    def __init__(self, request: Recorder, served: ServedModel, position: int, deadline_s: float) -> None:
        self._request, self._served, self._position, self._deadline_s = request, served, position, deadline_s
        self._stage = "decode"
        self._begun = [("decode", time.monotonic())]  # Each stage lasts until the next one begins.
        self._seconds: dict[str, float] = {}
        self._item: Item[Pending] | None = None
        self._batch: SpanContext | None = None

    def __enter__(self) -> ItemRecorder:
        return self

    def check_deadline(self) -> None:
        """Raises DEADLINE_EXCEEDED when it has passed, counted under the stage that was reached."""
        if time.monotonic() >= self._deadline_s:
            self._served.metrics.expired[self._stage].inc()
            raise too_late()

    def queued(self, item: Item[Pending]) -> None:
        """Its slot is filled, and it waits for a worker."""
        self._stage, self._item = "queue", item
        now_s = time.monotonic()
        self._begun.append(("queue", now_s))
        self._seconds["decode"] = now_s - self._begun[0][1]

    def computed(self, outcome: Outcome) -> None:
        """A worker has answered. What the device did not take was waiting, in our queue or in front of the worker."""
        self._stage, self._batch = "postprocess", outcome.batch
        now_s, queued_s = time.monotonic(), self._begun[1][1]
        infer_s = max(queued_s, now_s - outcome.infer_s)
        self._begun += [("infer", infer_s), ("post", now_s)]
        self._seconds |= {"queue": infer_s - queued_s, "infer": outcome.infer_s}

    def answered(self) -> None:
        """Its own answer is there. Raises DEADLINE_EXCEEDED when that is too late."""
        self.check_deadline()
        self._seconds["postprocess"] = time.monotonic() - self._begun[3][1]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        request, served = self._request, self._served
        now_s = time.monotonic()
        if request.trace is not None:
            # An item without an answer of its own (a row of tensors) ends with the device.
            begun = self._begun if kind is not None or "postprocess" in self._seconds else self._begun[:3]
            request.trace.stages(begun, now_s, self._position, self._batch)
        if kind is asyncio.CancelledError and request.abandoned:
            with_worker = self._stage == "queue" and self._item is not None and self._item.dispatched_s
            served.metrics.cancelled["infer" if with_worker else self._stage].inc()
        if kind is not None:
            return
        for stage, seconds in self._seconds.items():
            served.metrics.stage_seconds[stage].observe(seconds, request.exemplar)
        served.metrics.deadline_slack.observe(self._deadline_s - now_s)
        served.statistics.image(self._seconds)
        request.timings.include(self._seconds)
