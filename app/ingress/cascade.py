"""The flow of a request for a cascade.

    images ─► detector ─► boxes ─► their parts of the original image ─► classifier's queue ─► answers with both

Owns: this order, and which boxes are cut out. The parts are ordinary items of the second model: batched across
requests, with the request's own deadline and priority. They come in portions, two of which are no more than a request
may hold, so that whatever the detector finds fits into the classifier's queue. An image is decoded once for each model,
and once more for each further portion of its parts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from math import ceil, floor
from operator import attrgetter
from typing import Any, NamedTuple

from app.errors import invalid_request
from app.images.header import Region
from app.ingress.ingress import Ingress
from app.ingress.items import all_or_nothing
from app.ingress.prediction import Answer, computed, predict
from app.link import Cascade, Encoded, Frame, Regions, Terms
from models import Options


async def predict_cascade(
    ingress: Ingress, cascade: Cascade, images: Sequence[Encoded | Frame], terms: Terms, *, options: Options
) -> Answer:
    """Predict for images, all or nothing; detections that were looked at have `classes`. Raises ServiceError."""
    encoded = [image for image in images if not isinstance(image, Frame)]
    if len(encoded) < len(images):
        raise invalid_request(f"{cascade.name} takes encoded images: the classifier sees parts of the original")
    first, second = ingress.link.models[cascade.first], ingress.link.models[cascade.second]
    ingress.link.check(second, terms)  # Nothing is computed for a request that the classifier would refuse.
    found = await predict(ingress, first, encoded, terms, options=options)
    parts: list[_Part] = []
    for number, prediction in enumerate(found.predictions):
        detections = prediction["detections"]
        chosen = regions(cascade, detections, prediction["width"], prediction["height"])
        parts += [_Part(number, region, detections[which]) for which, region in chosen]

    async def classify(portions: Sequence[list[_Part]]) -> None:
        for portion in portions:
            contents = [
                Regions(encoded[number], [part.region for part in of_image])
                for number, of_image in groupby(portion, key=attrgetter("image"))
            ]
            answer = await computed(ingress, second, contents, terms, options=options)
            for part, classified in zip(portion, answer.predictions, strict=True):
                part.detection["classes"] = classified["classes"]

    # Two portions at a time: one is decoded while the other is computed.
    most = ingress.link.settings.max_images
    size = max(1, most // 2)
    portions = [parts[start : start + size] for start in range(0, len(parts), size)]
    await all_or_nothing([classify(portions[number::2]) for number in range(2)] if most > 1 else [classify(portions)])
    return found


class _Part(NamedTuple):
    """What the classifier looks at: a region of the image of this number, for this detection."""

    image: int
    region: Region
    detection: dict[str, Any]


def regions(
    cascade: Cascade, detections: Sequence[Mapping[str, Any]], width: int, height: int
) -> list[tuple[int, Region]]:
    """What is cut out of an image: the detection's position and the region, the best score first."""
    found: list[tuple[int, Region]] = []
    for number, detection in enumerate(detections):
        if len(found) >= cascade.most:
            break
        box = detection["box"]
        wide, high = box["x2"] - box["x1"], box["y2"] - box["y1"]
        if min(wide, high) < cascade.min_side or (cascade.classes and detection["label"] not in cascade.classes):
            continue
        left = min(width - 1, max(0, floor(box["x1"] - cascade.margin * wide)))
        top = min(height - 1, max(0, floor(box["y1"] - cascade.margin * high)))
        right = max(left + 1, min(width, ceil(box["x2"] + cascade.margin * wide)))
        bottom = max(top + 1, min(height, ceil(box["y2"] + cascade.margin * high)))
        found.append((number, Region(left, top, right - left, bottom - top)))
    return found
