"""What is recorded of batches: metrics, statistics and spans.

Owns: nothing that an answer depends on. What goes wrong here is logged and costs no answer.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from app.fleet.process import Computed, WorkerProcess
from app.fleet.served_model import ModelPool
from app.fleet.submission import Submission
from app.observability.metrics import Metrics
from app.observability.tracing import Tracing
from app.scheduling.queue import Batch

if TYPE_CHECKING:
    from opentelemetry.trace import SpanContext

log = logging.getLogger("anychip.dispatcher")


class BatchRecords:
    """Records batches when they are sent and when they are done."""

    def __init__(self, metrics: Metrics, tracing: Tracing | None) -> None:
        self._metrics, self._tracing = metrics, tracing

    def sent(self, batch: Batch[Submission], served: ModelPool, device: str) -> None:
        """A batch is sent to a worker of the device."""
        size, padding, _ = served.metrics.batch(device)
        size.observe(len(batch.items))
        if batch.size > len(batch.items):
            padding.inc(batch.size - len(batch.items))

    def done(
        self, batch: Batch[Submission], served: ModelPool, worker: WorkerProcess, done: Computed
    ) -> SpanContext | None:
        """A batch is done. Returns its span, where one of its requests is traced."""
        try:
            served.statistics.batch(len(batch.items), done.infer_s)
            served.metrics.batch(worker.device)[2].observe(done.infer_s)
            if done.fitted:
                self._metrics.out_of_memory.labels(batch.model, worker.device).inc()
            return self._span(batch, served, worker, done) if self._tracing else None
        except Exception:
            log.exception("batch %d could not be recorded", batch.id)
            return None

    def _span(
        self, batch: Batch[Submission], served: ModelPool, worker: WorkerProcess, done: Computed
    ) -> SpanContext | None:
        traces = [trace for item in batch.items if (trace := item.payload.terms.recorder.trace) is not None]
        if self._tracing is None or not traces:
            return None
        assert worker.ready is not None
        loaded = worker.ready.loaded[served.index]
        assert loaded is not None
        attributes = {
            "anychip.model": batch.model,
            "anychip.device": worker.device,
            "anychip.worker": worker.id,
            "anychip.engine": loaded.report.engine,
            "anychip.precision": loaded.report.precision,
            "anychip.images": len(batch.items),
            "anychip.padding": batch.size - len(batch.items),
            "anychip.infer_seconds": done.infer_s,
        }
        return self._tracing.batch(traces, batch.dispatched_s, time.monotonic(), attributes)
