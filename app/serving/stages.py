"""Two stages under one name: a detector, and a classifier of what it finds.

    plates = yolov8n?classes=car|bus&margin=0.1 > resnet50

Owns: how they are written, and which boxes are cut out. Must not know how anything is computed (app.serving.staged).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, floor
from typing import Any
from urllib.parse import parse_qsl

from app.config import STAGES
from app.decoder.messages import Region
from app.fleet.served_model import ServedModel
from models import ModelError, parse_spec

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_KEYS = "classes, margin, min_side and most"


@dataclass(frozen=True, slots=True)
class Stages:
    """`first` and `second`: names of served models. Boxes of `classes` (labels; none: all), at least `min_side` pixels
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
    def platform(self) -> str:
        """As Triton calls a model that is made of others."""
        return "ensemble"

    def check(self, models: Mapping[str, ServedModel]) -> None:
        """Raises ModelError for what cannot work."""
        if self.name in models:
            raise ModelError(f"two models have one name: {self.name}")
        for name in (self.first, self.second):
            if name not in models:
                raise ModelError(f"{self.name} needs the model {name!r}, and there is {', '.join(models)}.")
        first, second = models[self.first].model, models[self.second].model
        if first.finds != "objects":
            raise ModelError(f"the first stage of {self.name} must find objects, and {self.first} does not.")
        if second.finds != "classes":
            raise ModelError(f"the second stage of {self.name} must be a classifier, and {self.second} is not.")
        unknown = [label for label in self.classes if label not in first.labels]
        if unknown:
            raise ModelError(f"{self.first} has no class {unknown[0]!r}, which {self.name} wants.")

    def regions(self, detections: Sequence[Mapping[str, Any]], width: int, height: int) -> list[tuple[int, Region]]:
        """What is cut out of an image: the detection's position and the region, the best score first."""
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


def parse_stages(text: str) -> Stages:
    """`name=detector?options > classifier`. Raises ModelError."""
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
        raise ModelError(f"{name} has an option {next(iter(given))!r}; there is {_KEYS}.")
    if not (0 <= margin <= 1 and 1 <= min_side <= 1e6 and 1 <= most <= 1000):
        raise ModelError(f"of {name}, margin is from 0 to 1, min_side from 1 on, and most from 1 to 1000.")
    return Stages(name, _name_of(first.strip()), _name_of(parts[1]), classes, margin, min_side, most)


def _name_of(text: str) -> str:
    """The name of a model that is written so; a name alone is that of a model that is named elsewhere."""
    try:
        return parse_spec(text).name
    except ModelError:
        if _NAME.fullmatch(text):
            return text
        raise
