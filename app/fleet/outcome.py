"""What becomes of an item: who waits for it, and what they get."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from app.errors import ServiceError
from app.fleet.process import WorkerProcess
from app.observability.tracing import RequestTrace
from app.scheduling.queue import Item
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


def options_of(items: Sequence[Item[Pending]]) -> tuple[Options | TensorOptions, ...]:
    """What each item's request asks for, one for all where it is the same, as it mostly is."""
    options = tuple([item.payload.options for item in items])
    same = all([each is options[0] for each in options])  # noqa: C419 - faster
    return options[:1] if same else options


def too_late() -> ServiceError:
    """The deadline of something that was accepted has passed."""
    return ServiceError("DEADLINE_EXCEEDED", "the deadline passed before the answer was there")
