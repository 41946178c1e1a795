"""The flow of a request for two stages.

    images ─► detector ─► boxes ─► their parts of the original image ─► classifier's queue ─► answers with both

Owns: this order. The parts are ordinary items of the second model: batched across requests, with the request's own
deadline and priority. They come in portions, two of which are no more than a request may hold, so that whatever the
first stage finds fits into the second one's queue. An image is decoded once for each stage, and once more for each
further portion of its parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from operator import attrgetter
from typing import Any, NamedTuple

from app.decoder.messages import Region
from app.errors import invalid_request
from app.link import Cascade
from app.serving.cascades import regions
from app.serving.filling import Encoded, Frame
from app.serving.items import Fill, all_or_nothing
from app.serving.prediction import Answer, computed, predict
from app.serving.regions import RegionFills
from app.serving.service import Service
from app.serving.terms import Terms
from models import Options


async def predict_staged(
    service: Service, cascade: Cascade, images: Sequence[Encoded | Frame], terms: Terms, *, options: Options
) -> Answer:
    """As app.serving.prediction.predict; detections that were looked at have `classes`. Raises ServiceError."""
    encoded = [image for image in images if not isinstance(image, Frame)]
    if len(encoded) < len(images):
        raise invalid_request(f"{cascade.name} takes encoded images: the second stage sees parts of the original")
    first, second = service.models[cascade.first], service.models[cascade.second]
    service.admission.check(second, terms)  # Nothing is computed for a request that the second stage would refuse.
    found = await predict(service, first, encoded, terms, options=options)
    parts: list[_Part] = []
    for number, prediction in enumerate(found.predictions):
        detections = prediction["detections"]
        chosen = regions(cascade, detections, prediction["width"], prediction["height"])
        parts += [_Part(number, region, detections[which]) for which, region in chosen]

    async def classify(portions: Sequence[list[_Part]]) -> None:
        for portion in portions:
            fills: list[Fill] = []
            for number, of_image in groupby(portion, key=attrgetter("image")):
                places = [part.region for part in of_image]
                fills += RegionFills(service.filling, second, terms, encoded[number], places).fills()
            answer = await computed(service, second, fills, terms, options=options)
            for part, classified in zip(portion, answer.predictions, strict=True):
                part.detection["classes"] = classified["classes"]

    # Two portions at a time: one is decoded while the other is computed.
    most = service.settings.max_images
    size = max(1, most // 2)
    portions = [parts[start : start + size] for start in range(0, len(parts), size)]
    await all_or_nothing([classify(portions[number::2]) for number in range(2)] if most > 1 else [classify(portions)])
    return found


class _Part(NamedTuple):
    """What the second stage looks at: a region of the image of this number, for this detection."""

    image: int
    region: Region
    detection: dict[str, Any]
