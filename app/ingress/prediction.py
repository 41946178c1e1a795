"""Image requests: encoded images or pixels in, predictions out.

    room ─► each image computed (app.ingress.ingress) ─► postprocess ─► Answer

Owns: the answer for each image from a worker's result. Must not know a transport.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, cast

import msgspec
import numpy.typing as npt

from app.errors import ServiceError, invalid_request
from app.ingress.ingress import C, Ingress, Items
from app.link import ComputedBy, Regions, Result, ServedModel, Terms
from models import NormalisedModel, Options, PixelModel, Placement, TensorModel

log = logging.getLogger("anychip.service")

_INLINE_BYTES = 16 * 1024
"""Most bytes of a result that the event loop postprocesses: a thread would cost more than the work."""
_MOST_DETECTIONS = 30_000
"""Most detections of the images of one request: each is an object, and text in the event loop."""

Finish = Callable[[PixelModel, Sequence[npt.NDArray[Any]], Placement, Options], Any]
"""Function that makes an image's answer from a worker's result; pure, and may run in a thread."""


class Answer(msgspec.Struct, frozen=True):
    """Results of `Finish` in the order of the images, and the origin of the last. `is_large`: writing them as JSON
    takes long.
    """

    predictions: list[Any]
    computed_by: ComputedBy
    is_large: bool = False


def predict(
    ingress: Ingress,
    served: ServedModel,
    images: list[C],
    terms: Terms,
    *,
    options: Options,
    finish: Finish = PixelModel.postprocess,
) -> Awaitable[Answer]:
    """Predict for `images`, all or nothing, and empty it. Raises ServiceError; cancelled, it gives up its room."""
    if isinstance(served.model, TensorModel):
        name = served.model.name
        raise invalid_request(f"{name} takes tensors, not images: POST /v2/models/{name}/infer")
    possible = len(images) * options.max_detections
    if len(images) > 1 and possible > _MOST_DETECTIONS and served.model.finds == "objects":
        raise invalid_request(
            f"{len(images)} images with max_detections {options.max_detections} may have {possible} detections, and a "
            f"request {_MOST_DETECTIONS}"
        )
    return computed(ingress, served, images, terms, options=options, finish=finish)


async def computed(
    ingress: Ingress,
    served: ServedModel,
    contents: list[C],
    terms: Terms,
    *,
    options: Options,
    finish: Finish = PixelModel.postprocess,
    numbers: Sequence[int] | None = None,
) -> Answer:
    """Return the results of `finish` for images and parts of images, all or nothing. `contents`, `numbers`: as of
    Items.run; None: of several contents each is the next image. Raises ServiceError.
    """

    async def answer(result: Result) -> tuple[Any, ComputedBy, bool]:
        # The worker's own model: after a hand-over the labels may be others than when the image came.
        own = result.model
        model = cast(PixelModel, own.image_model if type(own) is NormalisedModel else own)  # isinstance costs more.
        if result.arrays is None:
            log.error("%s answered with NaN, infinity, a score above 1 or a class beyond its labels", model.name)
            raise ServiceError("INFERENCE_FAILED", "the model could not answer")
        if sum([array.nbytes for array in result.arrays]) <= _INLINE_BYTES and not model.adapter.offloaded:
            return finish(model, result.arrays, result.placement, options), result.computed_by, False
        made = await ingress.offload(finish, model, result.arrays, result.placement, options)
        return made, result.computed_by, True

    if numbers is None:
        numbers = range(len(contents)) if len(contents) > 1 else ()
    count = sum([len(each.regions) if isinstance(each, Regions) else 1 for each in contents])
    with ingress.link.reserve(served, count, terms) as room:
        answers = await Items(ingress.replies, room, options, answer).run(contents, numbers)
    return Answer([made for made, _, _ in answers], answers[-1][1], any([large for _, _, large in answers]))  # noqa: C419 - faster
