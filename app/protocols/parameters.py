"""Values that clients set by name: options, deadlines and priorities out of queries, headers and protocol parameters.

Owns: names, limits, and the sentences that say what is wrong with a value. Must not know frameworks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from functools import lru_cache
from typing import Any

from app.errors import invalid_request
from app.protocols.options import OPTION_NAMES, OPTIONS, Parameter
from models import Options

_MAX_TIMEOUT_S = 600.0

DEFAULT_OPTIONS = Options()
_LIKE = 0.85
"""Least likeness of a misspelt name; those of the protocols' own parameters are less like ours."""


def read_options(given: Mapping[str, Any]) -> Options:
    """Read options out of strings or numbers by name; names that are like none of ours are ignored.

    Raises INVALID_REQUEST for values out of range, NaN included, and for a misspelt name.
    """
    if not given:
        return DEFAULT_OPTIONS
    for name in given:
        if len(name) < _LONGEST_NAME and (meant := _misspelt(name)):
            raise invalid_request(f"there is no parameter {name!r} here; did you mean {meant}?")
    return Options(**{row.name: read(row, given) for row in OPTIONS if row.name in given})


_OTHER_NAMES = {
    "score_threshold": ("threshold", "conf", "confidence", "conf_threshold", "confidence_threshold", "min_score"),
    "iou_threshold": ("iou", "nms", "nms_threshold", "overlap_threshold"),
    "top_k": ("k", "n", "top", "topk", "top_n", "num_classes"),
    "max_detections": ("max", "limit", "max_det", "max_boxes"),
    "timeout_ms": ("timeout", "deadline", "deadline_ms"),
}
"""Names of our parameters in other servers and libraries."""
_LONGEST_NAME = 24


@lru_cache(maxsize=256)
def _misspelt(name: str) -> str:
    """Return the option that a name means which is none; "" if it means no option."""
    near = "" if name in OPTION_NAMES else "".join(get_close_matches(name.lower(), OPTION_NAMES, 1, _LIKE))
    other = next((each for each in OPTION_NAMES if name in _OTHER_NAMES.get(each, ())), "")
    return near or other


def check_names(rows: Iterable[Parameter], given: Iterable[str]) -> None:
    """Raise INVALID_REQUEST for a name that none of the rows has, and for one that comes twice.

    The message says which name is nearest.
    """
    known = [row.name for row in rows]
    seen = set()
    for name in given:
        if name not in known:
            meant = {other: each for each in known for other in (each, *_OTHER_NAMES.get(each, ()))}
            near = get_close_matches(name[:64].lower(), meant, 1)
            hint = f"did you mean {meant[near[0]]}?" if near else f"there is {', '.join(known)}"
            raise invalid_request(f"there is no parameter {name[:64]!r} here; {hint}")
        if name in seen:
            raise invalid_request(f"{name} is given more than once")
        seen.add(name)


def read(row: Parameter, given: Mapping[str, Any]) -> Any:
    """Return the value of a parameter, its default if it is not given. Raises INVALID_REQUEST."""
    name = row.name
    if name not in given:
        return row.default
    value = given[name]
    if row.choices:
        if value not in row.choices:
            raise invalid_request(f"{name} must be one of {', '.join(row.choices)}, not {value!r}")
        return value
    if row.or_zero and value == "0":
        return 0
    found = number(given, name, 0, row.low, row.high)
    if row.kind == "number":
        return found
    if found != int(found):
        raise invalid_request(f"{name} must be a whole number, not {value!r}")
    return int(found)


def read_headers(rows: Sequence[Parameter], headers: Mapping[bytes, bytes]) -> list[Any]:
    """Read parameters of headers or of gRPC's metadata, names in lower case. Raises INVALID_REQUEST."""
    given = [headers.get(row.name.lower().encode()) for row in rows]
    return [
        row.default if value is None else read(row, {row.name: value.decode("latin-1")})
        for row, value in zip(rows, given, strict=True)
    ]


def deadline_s(started_s: float, timeout_s: float) -> float:
    """Return the deadline of a request begun at `started_s` (`time.monotonic()`): as asked, at most ten minutes."""
    return started_s + min(timeout_s, _MAX_TIMEOUT_S)


def number(given: Mapping[str, Any], name: str, default: float, low: float, high: float) -> float:
    """Read a finite number from `low` to `high`. Raises INVALID_REQUEST."""
    if name not in given:
        return default
    try:
        value = float(given[name])
    except (TypeError, ValueError, OverflowError):
        value = math.nan
    if not low <= value <= high:
        raise invalid_request(f"{name} must be a number from {low:g} to {high:g}, not {given[name]!r}")
    return value


def switch(given: Mapping[str, Any], name: str, default: bool = False) -> bool:
    """Read true or false. Raises INVALID_REQUEST."""
    value = given.get(name, default)
    if not isinstance(value, bool):
        raise invalid_request(f"{name} must be true or false, not {value!r}")
    return value
