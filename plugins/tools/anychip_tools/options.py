"""Options that several commands share: a model's and a device's settings, lists of numbers.

Owns: which they are, and how numbers are read. Must not import torch: `anychip --help` has to answer at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from app.arguments import CommandError
from app.config import split

DEVICE_SETTINGS = ("device", "weights", "calibrate", "cache_dir", "null", "simulate", "plugins")
"""What commands need to open a model and a device."""

_Number = TypeVar("_Number", int, float)


def numbers(text: str, option: str, kind: Callable[[str], _Number]) -> list[_Number]:
    """The numbers above 0 that an option holds, by commas. Raises CommandError."""
    try:
        found = [kind(part) for part in split(text)]
    except ValueError:
        found = []
    if not found or not min(found) > 0:
        raise CommandError(f"{option} takes numbers above 0, by commas, not {text!r}")
    return found
