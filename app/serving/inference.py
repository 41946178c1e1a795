"""The flow of a request of tensors: arrays in, arrays out.

    check ─► reserve ─► pack each item into a slot ─► submit, outcome ─► collect ─► TensorAnswer

Owns: what tensors of a request become items of the queue, and their answer. Must not know HTTP or how tensors are
spoken there. An item is one row of the batch dimension: rows of several requests run together. Networks without a batch
dimension take a request as one item.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from app.errors import ServiceError
from app.scheduling.outcome import Outcome, too_late
from app.scheduling.scheduler import Reservation
from app.scheduling.served_model import ServedModel
from app.serving.service import Request, Service, all_or_nothing
from models import InputError, TensorModel, TensorOptions

Array = npt.NDArray[Any]
_INLINE_BYTES = 1 << 20
"""Items up to this size are copied in the event loop: a hop to a thread would cost more."""


@dataclass(frozen=True, slots=True)
class TensorAnswer:
    """Outputs by name, in the order asked for ([n, …] where the model has a batch dimension), and who made them."""

    outputs: dict[str, Array]
    weights: str
    device: str
    engine: str
    precision: str


def tensor_model(served: ServedModel) -> TensorModel:
    """The served model, one of tensors. Raises INVALID_REQUEST."""
    if not isinstance(served.model, TensorModel):
        name = served.model.name
        raise ServiceError("INVALID_REQUEST", f"{name} takes images, not tensors of its own")
    return served.model


async def infer(
    service: Service,
    served: ServedModel,
    inputs: Mapping[str, Array],
    request: Request,
    outputs: Sequence[str] = (),
) -> TensorAnswer:
    """Answer for arrays of the declared types and shapes, all or nothing. `outputs`: names; none means all.

    `request.options` is not used. Raises ServiceError (INVALID_REQUEST for arrays that do not fit); cancelled, it gives
    up its reservation at once.
    """
    model = tensor_model(served)
    try:
        count, options = model.asked(inputs, outputs)
    except InputError as error:
        raise ServiceError("INVALID_REQUEST", str(error)) from None
    if count > service.settings.max_images:
        limit = service.settings.max_images
        raise ServiceError("INVALID_REQUEST", f"a batch of {count} is more than the {limit} a request may hold")
    reservation = service.reserve(served, count, request)
    asked = _Asked(service, served, model, inputs, options, request, reservation)
    try:
        if count == 1:
            outcomes = [await asked.item(0)]
        else:
            outcomes = await all_or_nothing([asked.item(row) for row in range(count)])
        started_s = time.monotonic()
        results = [outcome.result or () for outcome in outcomes]
        if sum(array.nbytes for result in results for array in result) <= _INLINE_BYTES:
            collected = model.collect(results, options)
        else:
            collected = await service.offload(model.collect, results, options)
        now_s = time.monotonic()
        if now_s >= request.deadline_s:
            served.metrics.expired["postprocess"].inc(count)
            raise too_late()
        served.metrics.stage_seconds["postprocess"].observe(now_s - started_s)
        served.statistics.stages["postprocess"].add(now_s - started_s)
        request.timings.include({"postprocess": now_s - started_s})
    finally:
        service.settle(served, reservation)
    worker = outcomes[-1].worker
    assert worker.ready is not None
    loaded = worker.ready.loaded[served.index]
    assert loaded is not None
    weights = worker.model(served.index).weights
    return TensorAnswer(collected, weights, worker.device, loaded.report.engine, loaded.report.precision)


@dataclass(frozen=True, slots=True)
class _Asked:
    """A request that has its reservation in the queue."""

    service: Service
    served: ServedModel
    model: TensorModel
    inputs: Mapping[str, Array]
    options: TensorOptions
    request: Request
    reservation: Reservation

    async def item(self, row: int) -> Outcome:
        """One item, one of those reserved, to what its worker made of it."""
        served, dispatcher = self.served, self.service.dispatcher
        stage = "decode"
        started_s = time.monotonic()
        begun = [(stage, started_s)]
        batch = None
        try:
            slot = served.slots.take()
            target = dispatcher.arena.slot(served.index, slot)
            try:
                if target.nbytes <= _INLINE_BYTES:
                    self.model.pack(self.inputs, row, target)
                else:
                    await self.service.offload(self.model.pack, self.inputs, row, target)
            except BaseException:
                served.slots.give(slot)
                raise
            packed_s = time.monotonic()
            stage = "queue"
            begun.append((stage, packed_s))
            item = dispatcher.submit(self.reservation, slot, self.options, row, self.request.trace)
            outcome = await dispatcher.outcome(served, item)
            now_s = time.monotonic()
            infer_begun_s = max(packed_s, now_s - outcome.infer_s)
            begun.append(("infer", infer_begun_s))
            batch = outcome.batch
        except asyncio.CancelledError:
            if self.request.abandoned:
                with_worker = stage == "queue" and item.dispatched_s
                served.metrics.cancelled["infer" if with_worker else stage].inc()
            raise
        finally:
            if self.request.trace is not None:
                self.request.trace.stages(begun, time.monotonic(), row, batch)
        stages = {"decode": packed_s - started_s, "queue": infer_begun_s - packed_s, "infer": outcome.infer_s}
        for name, seconds in stages.items():
            served.metrics.stage_seconds[name].observe(seconds, self.request.exemplar)
        served.metrics.deadline_slack.observe(self.request.deadline_s - now_s)
        served.statistics.image(stages)
        self.request.timings.include(stages)
        return outcome
