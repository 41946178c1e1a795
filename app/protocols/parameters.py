"""What clients set by name: options, deadlines and priorities out of queries, headers and protocol parameters.

Owns: names, limits, and the sentences that say what is wrong with a value. Must not know frameworks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from app.errors import invalid_request
from app.protocols.options import OPTIONS, Parameter
from models import MASK_FORMS, MaskForm, Options

_MAX_TIMEOUT_S = 600.0

DEFAULT_OPTIONS = Options()


def read_options(given: Mapping[str, Any]) -> Options:
    """Options out of strings or numbers by name; names this service does not know are left alone.

    Raises INVALID_REQUEST for values out of range, NaN included.
    """
    if not given:
        return DEFAULT_OPTIONS
    return Options(**{row.name: _read(row, given) for row in OPTIONS if row.name in given})


def _read(row: Parameter, given: Mapping[str, Any]) -> Any:
    if row.kind == "string":
        return _mask_form(given[row.name])
    return (whole if row.kind == "integer" else number)(given, row.name, 0, row.low, row.high)


def _mask_form(given: Any) -> MaskForm:
    for form in MASK_FORMS:
        if given == form:
            return form
    raise invalid_request(f"masks must be one of {', '.join(MASK_FORMS)}, not {given!r}")


def read_priority(given: Any) -> int:
    """`X-Priority`: 0 is normal, higher goes first; None where it is not given. Raises INVALID_REQUEST."""
    return 0 if given is None else whole({"X-Priority": given}, "X-Priority", 0, -100, 100)


def deadline_s(started_s: float, timeout_s: float) -> float:
    """The deadline of a request that began at `started_s` (`time.monotonic()`): as wanted, at most ten minutes."""
    return started_s + min(timeout_s, _MAX_TIMEOUT_S)


def number(given: Mapping[str, Any], name: str, default: float, low: float, high: float) -> float:
    """A finite number from `low` to `high`. Raises INVALID_REQUEST."""
    if name not in given:
        return default
    try:
        value = float(given[name])
    except (TypeError, ValueError, OverflowError):
        value = math.nan
    if not low <= value <= high:
        raise invalid_request(f"{name} must be a number from {low:g} to {high:g}, not {given[name]!r}")
    return value


def whole(given: Mapping[str, Any], name: str, default: int, low: float, high: float) -> int:
    """As `number`, without a fraction."""
    if name not in given:
        return default
    value = number(given, name, default, low, high)
    if value != int(value):
        raise invalid_request(f"{name} must be a whole number, not {given[name]!r}")
    return int(value)


def switch(given: Mapping[str, Any], name: str, default: bool = False) -> bool:
    """True or false. Raises INVALID_REQUEST."""
    value = given.get(name, default)
    if not isinstance(value, bool):
        raise invalid_request(f"{name} must be true or false, not {value!r}")
    return value
