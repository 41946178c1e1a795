"""The flow of a request of tensors: arrays in, arrays out.

    check ─► reservation ─► each row into a slot, computed (app.serving.items) ─► collect ─► TensorAnswer

Owns: what tensors of a request become items of the queue, and their answer. Must not know a transport or how tensors
are spoken there. An item is one row of the batch dimension: rows of several requests run together. Networks without a
batch dimension take a request as one item.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy.typing as npt

from app.errors import invalid_request
from app.fleet.outcome import Outcome, too_late
from app.link import ServedModel
from app.serving.filling import INLINE_BYTES
from app.serving.items import ComputedBy, Items, computed_by
from app.serving.service import Service
from app.serving.terms import Terms
from models import InputError, Placement, TensorModel

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class TensorAnswer:
    """Outputs by name, in the order asked for ([n, …] where the model has a batch dimension), and who computed them."""

    outputs: dict[str, Array]
    computed_by: ComputedBy


async def infer(
    service: Service,
    served: ServedModel,
    inputs: Mapping[str, Array],
    terms: Terms,
    outputs: Sequence[str] = (),
) -> TensorAnswer:
    """Answer for arrays of the declared types and shapes, all or nothing. `outputs`: names; none means all.

    Raises ServiceError (INVALID_REQUEST for arrays that do not fit); cancelled, it gives up its reservation at once.
    """
    model = served.model
    if not isinstance(model, TensorModel):
        raise invalid_request(f"{model.name} takes images, not tensors of its own")
    try:
        count, options = model.asked(inputs, outputs)
    except InputError as error:
        raise invalid_request(str(error)) from None
    if count > service.settings.max_images:
        limit = service.settings.max_images
        raise invalid_request(f"a batch of {count} is more than the {limit} a request may hold")
    pool = service.pool(served)
    with service.admission.reserved(pool, count, terms) as reservation:
        items = Items(service.dispatcher, pool, terms, reservation, options, _outcome, has_answers=False)
        fills = [partial(service.filling.row, pool, model, inputs) for row in range(count)]
        outcomes = await items.run(fills)
        started_s = time.monotonic()
        results = [outcome.result or () for outcome in outcomes]
        if sum(array.nbytes for result in results for array in result) <= INLINE_BYTES:
            collected = model.collect(results, options)
        else:
            collected = await service.offload(model.collect, results, options)
        now_s = time.monotonic()
        if now_s >= terms.deadline_s:
            served.metrics.expired["postprocess"].inc(count)
            raise too_late()
        terms.recorder.collected(served, now_s - started_s)
    return TensorAnswer(collected, computed_by(pool, outcomes[-1]))


async def _outcome(outcome: Outcome, _: Placement) -> Outcome:
    return outcome
