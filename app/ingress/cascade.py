"""Cascades: the flow of a request that asks several models about its images.

    images ─► first model ─► parts of the original image ─► later models' queues ─► one entry an image

Owns: this flow; the cascade decides the questions (models.contract.cascade). Parts are ordinary items of a later model:
batched across requests, with the request's own deadline and priority. They come in portions, two of which are no more
than a request may hold, so that any number of parts fits into a queue. An image is decoded once for each model that
sees parts of it, and once more for each further portion.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Any

from app.errors import invalid_request
from app.ingress.ingress import Ingress, all_or_nothing
from app.ingress.prediction import Answer, computed, predict
from app.link import ComputedBy, Encoded, Frame, Regions, ServedModel, Terms
from models import Options
from models.contract.cascade import Cascade, Region

Part = tuple[int, Region]
"""Number of an image, and a region of it."""


async def predict_cascade(
    ingress: Ingress,
    cascade: Cascade,
    first: ServedModel,
    images: Sequence[Encoded | Frame],
    terms: Terms,
    *,
    options: Options,
) -> Answer:
    """Predict for images, all or nothing, by `first` and the later models; return the entries. Raises ServiceError."""
    encoded = [image for image in images if not isinstance(image, Frame)]
    if len(encoded) < len(images):
        raise invalid_request(f"{cascade.name} takes encoded images: later models see parts of the original")
    served = {cascade.models[0]: first, **{name: ingress.link.choose(name) for name in cascade.models[1:]}}
    for name in cascade.models[1:]:  # Nothing is computed for a request that a later model would refuse.
        await ingress.link.check(served[name], terms)
    request = _Request(ingress, served, encoded, terms, options)
    entries = await cascade.predict(request, options)
    assert request.computed_by is not None, f"{cascade.name} asked no model"
    return Answer(entries, request.computed_by)


@dataclass(eq=False)
class _Request:
    """Images of one request, as a cascade sees them (models.contract.cascade.CascadeRequest).

    `served`: the version of each model that answers this request; `computed_by`: origin of the first answer.
    """

    ingress: Ingress
    served: Mapping[str, ServedModel]
    images: Sequence[Encoded]
    terms: Terms
    options: Options
    computed_by: ComputedBy | None = None

    def sizes(self) -> list[tuple[int, int]]:
        return self.ingress.link.sizes(self.images, self.terms)

    async def whole(self, model: str) -> list[dict[str, Any]]:
        served = self.served[model]
        return self._taken(await predict(self.ingress, served, [*self.images], self.terms, options=self.options))

    async def parts(self, model: str, parts: Sequence[Part]) -> list[dict[str, Any]]:
        ingress, served = self.ingress, self.served[model]

        async def ask(portions: Sequence[Sequence[Part]]) -> list[list[dict[str, Any]]]:
            answers = []
            for portion in portions:
                groups = [(number, [*group]) for number, group in groupby(portion, key=itemgetter(0))]
                contents = [Regions(self.images[number], [region for _, region in group]) for number, group in groups]
                numbers = [number for number, _ in groups] if len(self.images) > 1 else ()
                answer = await computed(ingress, served, contents, self.terms, options=self.options, numbers=numbers)
                answers.append(self._taken(answer))
            return answers

        # Two portions at a time: one is decoded while the other is computed.
        most = ingress.link.settings.max_images
        size = max(1, most // 2)
        portions = [parts[start : start + size] for start in range(0, len(parts), size)]
        lanes = min(2, most)
        answered = await all_or_nothing([ask(portions[lane::lanes]) for lane in range(lanes)])
        found: list[dict[str, Any]] = []
        for number in range(len(portions)):
            found += answered[number % lanes][number // lanes]
        return found

    def _taken(self, answer: Answer) -> list[dict[str, Any]]:
        self.computed_by = self.computed_by or answer.computed_by
        return answer.predictions
