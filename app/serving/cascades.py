"""Two stages under one name: a detector, and a classifier of what it finds.

    plates = yolov8n?classes=car|bus&margin=0.1 > resnet50

Owns: how they are written, and which boxes are cut out. Must not know how anything is computed (app.serving.staged).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from urllib.parse import parse_qsl

from app.config import STAGES
from app.link import Cascade, ServedModel
from models import ModelError, parse_spec

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_KEYS = "classes, margin, min_side and most"


def check_cascade(cascade: Cascade, models: Mapping[str, ServedModel]) -> None:
    """Raises ModelError for what cannot work."""
    if cascade.name in models:
        raise ModelError(f"two models have one name: {cascade.name}")
    for name in (cascade.first, cascade.second):
        if name not in models:
            raise ModelError(f"{cascade.name} needs the model {name!r}, and there is {', '.join(models)}.")
    first, second = models[cascade.first].model, models[cascade.second].model
    if first.finds != "objects":
        raise ModelError(f"the first stage of {cascade.name} must find objects, and {cascade.first} does not.")
    if second.finds != "classes":
        raise ModelError(f"the second stage of {cascade.name} must be a classifier, and {cascade.second} is not.")
    unknown = [label for label in cascade.classes if label not in first.labels]
    if unknown:
        raise ModelError(f"{cascade.first} has no class {unknown[0]!r}, which {cascade.name} wants.")


def parse_cascade(text: str) -> Cascade:
    """Read `name=detector?options > classifier`. Raises ModelError."""
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
    return Cascade(name, _name_of(first.strip()), _name_of(parts[1]), classes, margin, min_side, most)


def _name_of(text: str) -> str:
    """The name of a model that is written so; a name alone is that of a model that is named elsewhere."""
    try:
        return parse_spec(text).name
    except ModelError:
        if _NAME.fullmatch(text):
            return text
        raise
