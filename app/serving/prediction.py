"""The flow of a request of images: encoded images or pixels in, predictions out.

    reservation ─► each image into a slot, computed (app.serving.items) ─► postprocess ─► Answer

Owns: what is made of what a worker sent for an image. Must not know a transport.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy.typing as npt

from app.errors import ServiceError, invalid_request
from app.fleet.outcome import Outcome
from app.fleet.served_model import ModelPool
from app.link import ServedModel
from app.serving.filling import Encoded, Frame
from app.serving.items import ComputedBy, Fill, Items, computed_by
from app.serving.service import Service
from app.serving.terms import Terms
from models import NormalisedModel, Options, PixelModel, Placement, TensorModel

log = logging.getLogger("anychip.service")

_INLINE_BYTES = 16 * 1024
"""Results up to this size are postprocessed in the event loop: a hop to a thread would cost more than the work."""
_MOST_DETECTIONS = 30_000
"""Detections that the images of one request may have together: each is an object, and text in the event loop."""

Finish = Callable[[PixelModel, Sequence[npt.NDArray[Any]], Placement, Options], Any]
"""What is made of what the worker sent for an image; pure, and may run in a thread."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What `Finish` made of each image, in the order of the images, and who computed the last of them."""

    predictions: list[Any]
    computed_by: ComputedBy


def prediction(model: PixelModel, outputs: Sequence[npt.NDArray[Any]], placement: Placement, options: Options) -> Any:
    """One entry of "predictions"."""
    return model.postprocess(outputs, placement, options)


async def predict(
    service: Service,
    served: ServedModel,
    images: Sequence[Encoded | Frame],
    terms: Terms,
    *,
    options: Options,
    finish: Finish = prediction,
) -> Answer:
    """Predict for images, all or nothing. Raises ServiceError; cancelled, it gives up its reservation at once."""
    if isinstance(served.model, TensorModel):
        name = served.model.name
        raise invalid_request(f"{name} takes tensors, not images: POST /v2/models/{name}/infer")
    possible = len(images) * options.max_detections
    if served.model.finds == "objects" and len(images) > 1 and possible > _MOST_DETECTIONS:
        raise invalid_request(
            f"{len(images)} images with max_detections {options.max_detections} may have {possible} detections, and a "
            f"request {_MOST_DETECTIONS}"
        )

    pool = service.pool(served)
    fills = [partial(service.filling.image, pool, terms, image) for image in images]
    return await computed(service, pool, fills, terms, options=options, finish=finish)


async def computed(
    service: Service,
    served: ModelPool,
    fills: Sequence[Fill],
    terms: Terms,
    *,
    options: Options,
    finish: Finish = prediction,
) -> Answer:
    """What `finish` makes of items that are filled so, all or nothing. Raises ServiceError."""

    async def answer(outcome: Outcome, placement: Placement) -> tuple[Any, ComputedBy]:
        by = computed_by(served, outcome)
        # The worker's own model: after a hand-over the labels may be others than when the image came.
        computed_with = outcome.worker.model(served.index)
        assert isinstance(computed_with, (PixelModel, NormalisedModel))
        model = computed_with.image_model
        if outcome.result is None:
            log.error("%s answered with NaN or infinity", model.name)
            raise ServiceError("INFERENCE_FAILED", "the model could not answer")
        if sum(array.nbytes for array in outcome.result) <= _INLINE_BYTES:
            return finish(model, outcome.result, placement, options), by
        return await service.offload(finish, model, outcome.result, placement, options), by

    with service.admission.reserved(served, len(fills), terms) as reservation:
        items = Items(service.dispatcher, served, terms, reservation, options, answer)
        answers = await items.run(fills)
    return Answer([made for made, _ in answers], answers[-1][1])
