"""Inference requests: of tensors, arrays in, arrays out; of images, their outputs by name.

    check ─► room ─► each row computed (app.ingress.ingress) ─► collect ─► outputs by name
    Work (app.protocols.open_inference) ─► run ─► InferenceResponse

Owns: the split of a request's tensors into items, and their answer. Must not know a transport. An item is one row of
the batch dimension: rows of several requests run together. Without a batch dimension a request is one item.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from app import clock
from app.errors import invalid_request
from app.ingress.cascade import predict_cascade
from app.ingress.ingress import Ingress, Items
from app.ingress.prediction import predict
from app.link import INLINE_BYTES, Array, Result, ServedModel, TensorRow, Terms, too_late
from app.protocols import open_inference
from app.protocols.open_inference import Work
from app.protocols.wire import InferenceResponse
from models import InputError, PixelModel, TensorModel


async def infer(
    ingress: Ingress,
    served: ServedModel,
    inputs: Mapping[str, Array],
    terms: Terms,
    outputs: Sequence[str] = (),
) -> tuple[dict[str, Array], list[Result]]:
    """Answer for arrays of the declared types and shapes, all or nothing. `outputs`: names; none means all.

    Returns the outputs by name, in the order of the request ([n, …] if the model has a batch dimension), and the
    results that they are made of. Raises ServiceError (INVALID_REQUEST for arrays that do not fit); cancelled, it gives
    up its room at once.
    """
    model = served.model
    if not isinstance(model, TensorModel):
        raise invalid_request(f"{model.name} takes images, not tensors of its own")
    try:
        count, options = model.asked(inputs, outputs)
    except InputError as error:
        raise invalid_request(str(error)) from None
    if count > ingress.link.settings.max_images:
        limit = ingress.link.settings.max_images
        raise invalid_request(f"a batch of {count} is more than the {limit} a request may hold")
    with ingress.link.reserve(served, count, terms) as room:
        items: Items[Result] = Items(ingress.replies, room, options, None)
        computed = await items.run([TensorRow(inputs)] * count)
        started_s = clock.monotonic()
        results = [result.arrays or () for result in computed]
        if sum(array.nbytes for result in results for array in result) <= INLINE_BYTES:
            collected = model.collect(results, options)
        else:
            collected = await ingress.offload(model.collect, results, options)
        now_s = clock.monotonic()
        if now_s >= terms.deadline_s:
            served.metrics.expired["postprocess"].inc(count)
            raise too_late()
        terms.recorder.collected(served.metrics, now_s - started_s)
    return collected, computed


async def run(ingress: Ingress, served: ServedModel, work: Work) -> InferenceResponse:
    """Compute the work. Raises ServiceError; cancelled, it gives up its room."""
    names = [output.name for output in work.outputs]
    if work.cascade is not None:
        found = await predict_cascade(ingress, work.cascade, served, work.images, work.terms, options=work.options)
        texts = [orjson.dumps(each) for each in found.predictions]
        made_by = ingress.made_by(found.computed_by)
        return InferenceResponse([open_inference.result(output, texts, ()) for output in work.outputs], made_by)
    if isinstance(served.model, PixelModel):
        form = served.floats if work.floats else served
        assert form is not None
        answer = await predict(
            ingress, form, [*work.images], work.terms, options=work.options, finish=open_inference.finisher(set(names))
        )
        made: Mapping[str, Any] = {name: [each[name] for each, _ in answer.predictions] for name in names}
        labels = [own for _, own in answer.predictions]
        made_by = ingress.made_by(answer.computed_by)
    else:
        made, computed = await infer(ingress, served, work.arrays, work.terms, names)
        made_by, labels = ingress.made_by(computed[-1].computed_by), [result.model.labels for result in computed]
    if sum(map(open_inference.size_bytes, made.values())) <= INLINE_BYTES:
        outputs = open_inference.results(work.outputs, made, labels)
    else:
        outputs = await ingress.offload(open_inference.results, work.outputs, made, labels)
    return InferenceResponse(outputs, made_by)
