"""Options that several commands share. Must not import torch: `anychip --help` has to answer at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from app.arguments import CommandError
from app.config.values import split

_MODEL = ("weights", "weights_mirror", "trust_exported", "calibrate", "cache_dir")
DEVICE_SETTINGS = ("device", *_MODEL, "null", "simulate", "plugins")
"""Settings with which commands open a model and a device."""

_Number = TypeVar("_Number", int, float)


def numbers(text: str, option: str, kind: Callable[[str], _Number]) -> list[_Number]:
    """Read an option's numbers above 0, separated by commas. Raises CommandError."""
    try:
        found = [kind(part) for part in split(text)]
    except ValueError:
        found = []
    if not found or not min(found) > 0:
        raise CommandError(f"{option} takes numbers above 0, by commas, not {text!r}")
    return found
