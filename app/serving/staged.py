"""The flow of a request for two stages.

    images ─► detector ─► boxes ─► their parts of the original image ─► classifier's queue ─► answers with both

Owns: this order. The parts are ordinary items of the second model: batched across requests, with the request's own
deadline and priority. An image is decoded once for each stage.
"""

from __future__ import annotations

from collections.abc import Sequence

from app.errors import invalid_request
from app.serving.filling import Encoded, Frame
from app.serving.items import Fill
from app.serving.prediction import Answer, computed, predict
from app.serving.regions import RegionFills
from app.serving.service import Service
from app.serving.stages import Stages
from app.serving.terms import Terms
from models import Options


async def predict_staged(
    service: Service, stages: Stages, images: Sequence[Encoded | Frame], terms: Terms, *, options: Options
) -> Answer:
    """As app.serving.prediction.predict; detections that were looked at have `classes`. Raises ServiceError."""
    encoded = [image for image in images if not isinstance(image, Frame)]
    if len(encoded) < len(images):
        raise invalid_request(f"{stages.name} takes encoded images: the second stage sees parts of the original")
    first, second = service.find(stages.first), service.find(stages.second)
    service.admission.check(second, terms)  # Nothing is computed for a request that the second stage would refuse.
    found = await predict(service, first, encoded, terms, options=options)
    fills: list[Fill] = []
    looked_at = []
    for image, prediction in zip(encoded, found.predictions, strict=True):
        chosen = stages.regions(prediction["detections"], prediction["width"], prediction["height"])
        if chosen:
            regions = [region for _, region in chosen]
            fills += RegionFills(service.filling, second, terms, image, regions).fills()
        looked_at += [prediction["detections"][number] for number, _ in chosen]
    if fills:
        answer = await computed(service, second, fills, terms, options=options)
        for detection, classified in zip(looked_at, answer.predictions, strict=True):
            detection["classes"] = classified["classes"]
    return found
