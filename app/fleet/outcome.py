"""What becomes of an item: who waits for it, and what they get."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from app.errors import ServiceError
from app.fleet.process import WorkerProcess
from app.observability.tracing import RequestTrace
from app.scheduling.queue import Batch
from app.worker.messages import Run
from models import Options, TensorOptions

if TYPE_CHECKING:
    from opentelemetry.trace import SpanContext

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a worker computed for one item.

    `result`: what `Model.reduce` returned; None where the network computed NaN. `batch`: the span of its batch, where
    it is traced.
    """

    result: tuple[Array, ...] | None
    worker: WorkerProcess
    infer_s: float
    batch: SpanContext | None = None


@dataclass(eq=False, slots=True)
class Pending:
    """What the dispatcher keeps with an item: its slot, and who waits for it. `request_id` is for the log."""

    slot: int
    options: Options | TensorOptions
    future: asyncio.Future[Outcome]
    request_id: str
    trace: RequestTrace | None


def run_of(batch: Batch[Pending], model: int, slots: tuple[int, ...], files: tuple[int, ...]) -> Run:
    """What a worker hears of a batch: one item's options for all where they are the same, as they mostly are."""
    asked = [item.payload.options for item in batch.items]
    if all([each is asked[0] for each in asked]):  # noqa: C419 - faster
        asked = asked[:1]
    options = tuple([each for each in asked if isinstance(each, Options)])
    tensor_options = tuple([each for each in asked if isinstance(each, TensorOptions)])
    return Run(batch.id, model, slots, options, batch.size, files, tensor_options)


def too_late() -> ServiceError:
    """The deadline of something that was accepted has passed."""
    return ServiceError("DEADLINE_EXCEEDED", "the deadline passed before the answer was there")
