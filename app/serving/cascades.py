"""Two-stage cascades: a detector, and a classifier of its detections, under one name.

    plates = yolov8n?classes=car|bus&margin=0.1 > resnet50

Other packages bring other cascades (models.contract.cascade).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, floor
from types import MappingProxyType
from typing import Any
from urllib.parse import parse_qsl

from app.config.values import STAGES
from app.link import ServedModel
from models import Model, ModelError, Options
from models.contract.cascade import Cascade, CascadeRequest, Region, made

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True)
class TwoStages(Cascade):
    """A detector, and a classifier of its detections.

    `first` and `second`: names of served models. Boxes of `classes` (labels; none: all), at least `min_side` pixels
    wide and high, the `most` best of an image, are cut out with `margin` of their sides around them.
    """

    name: str
    first: str
    second: str
    classes: tuple[str, ...] = ()
    margin: float = 0.0
    min_side: float = 8.0
    most: int = 20

    @property
    def models(self) -> tuple[str, ...]:  # type: ignore[override]
        """Return the names of both models."""
        return self.first, self.second

    def check(self, models: Mapping[str, Model]) -> None:  # noqa: D102
        first, second = models[self.first], models[self.second]
        if first.finds != "objects":
            raise ModelError(f"the first stage of {self.name} must find objects, and {self.first} does not.")
        if second.finds != "classes":
            raise ModelError(f"the second stage of {self.name} must be a classifier, and {self.second} is not.")
        unknown = [label for label in self.classes if label not in first.labels]
        if unknown:
            raise ModelError(f"{self.first} has no class {unknown[0]!r}, which {self.name} wants.")

    async def predict(self, request: CascadeRequest, options: Options) -> list[dict[str, Any]]:
        """Return the detector's answer; detections that were classified have `classes`."""
        found = await request.whole(self.first)
        looked_at = [
            (number, region, prediction["detections"][which])
            for number, prediction in enumerate(found)
            for which, region in self.regions(prediction["detections"], prediction["width"], prediction["height"])
        ]
        classified = await request.parts(self.second, [(number, region) for number, region, _ in looked_at])
        for (_, _, detection), answer in zip(looked_at, classified, strict=True):
            detection["classes"] = answer["classes"]
        return found

    def regions(self, detections: Sequence[Mapping[str, Any]], width: int, height: int) -> list[tuple[int, Region]]:
        """Return the regions to cut out of an image: each detection's position and its region, the best score first."""
        found: list[tuple[int, Region]] = []
        for number, detection in enumerate(detections):
            if len(found) >= self.most:
                break
            box = detection["box"]
            wide, high = box["x2"] - box["x1"], box["y2"] - box["y1"]
            if min(wide, high) < self.min_side or (self.classes and detection["label"] not in self.classes):
                continue
            left = min(width - 1, max(0, floor(box["x1"] - self.margin * wide)))
            top = min(height - 1, max(0, floor(box["y1"] - self.margin * high)))
            right = max(left + 1, min(width, ceil(box["x2"] + self.margin * wide)))
            bottom = max(top + 1, min(height, ceil(box["y2"] + self.margin * high)))
            found.append((number, Region(left, top, right - left, bottom - top)))
        return found


def check_cascade(cascade: Cascade, models: Mapping[str, ServedModel]) -> None:
    """Raise ModelError if the cascade's name is taken, a model is missing, or the models do not fit."""
    if cascade.name in models:
        raise ModelError(f"two models have one name: {cascade.name}")
    for name in cascade.models:
        if name not in models:
            raise ModelError(f"{cascade.name} needs the model {name!r}, and there is {', '.join(models)}.")
    cascade.check({name: models[name].model for name in cascade.models})


def parse_cascade(text: str, written: Mapping[str, str] = MappingProxyType({})) -> Cascade:
    """Read `name=detector?options > classifier`, or a cascade of another package. Raises ModelError.

    `written`: names of the known models, by their text in the settings.
    """
    if STAGES not in text:
        return made(text)
    name, equals, rest = text.partition("=")
    parts = [part.strip() for part in rest.split(STAGES)]
    name = name.strip()
    if not equals or len(parts) != 2 or not all(parts) or not _NAME.fullmatch(name):
        raise ModelError(f"{text!r} is not understood: two stages are written name=detector > classifier.")
    first, _, options = parts[0].partition("?")
    given = dict(parse_qsl(options, keep_blank_values=True))
    try:
        classes = tuple(label for label in given.pop("classes", "").split("|") if label)
        margin, min_side = float(given.pop("margin", 0.0)), float(given.pop("min_side", 8.0))
        most = int(given.pop("most", 20))
    except ValueError as error:
        raise ModelError(f"the options of {name} are not understood: {error}.") from None
    if given:
        raise ModelError(f"{name} has an option {next(iter(given))!r}; there is classes, margin, min_side and most.")
    if not (0 <= margin <= 1 and 1 <= min_side <= 1e6 and 1 <= most <= 1000):
        raise ModelError(f"of {name}, margin is from 0 to 1, min_side from 1 on, and most from 1 to 1000.")
    stages = _name_of(first.strip(), written), _name_of(parts[1], written)
    return TwoStages(name, *stages, classes, margin, min_side, most)


def _name_of(text: str, written: Mapping[str, str]) -> str:
    if text in written or text in written.values():
        return written.get(text, text)
    from models import parse_spec

    try:
        return parse_spec(text).name
    except ModelError:
        if _NAME.fullmatch(text):
            return text
        raise
