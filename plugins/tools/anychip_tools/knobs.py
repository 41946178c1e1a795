"""Numbers that set the behaviour of a simulated device: fields of a dataclass, given as `name=value`.

Owns: the range of each number, and reading it. Must not know its effect.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import Field, field, fields
from typing import Any


def knob(default: float, least: float, most: float) -> Any:
    """Declare a field from `least` to `most`; it takes whole numbers if its default is an int."""
    return field(default=default, metadata={"range": (least, most)})


def knobs(kind: Any) -> Mapping[str, Field[Any]]:
    """Return the knobs of a dataclass, by name."""
    return {each.name: each for each in fields(kind) if "range" in each.metadata}


def value_of(knob: Field[Any], text: str) -> float:
    """Read a knob's value. Raises ValueError, which says what the knob takes."""
    whole, (least, most) = isinstance(knob.default, int), knob.metadata["range"]
    found = re.fullmatch(r"[0-9]+" if whole else r"[0-9]+(\.[0-9]*)?", text)
    if not found or not least <= float(text) <= most:
        raise ValueError(f"it takes a {'whole ' if whole else ''}number from {least} to {most}")
    return int(text) if whole else float(text)
