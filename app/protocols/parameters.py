"""Values that clients set by name: options, deadlines and priorities out of queries, headers and protocol parameters.

Owns: names, limits, and the sentences that say what is wrong with a value. Must not know frameworks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qsl

from app.errors import invalid_request
from app.protocols.options import OPTIONS, X_PRIORITY, X_TIMEOUT_MS, Parameter
from app.protocols.wire import checked_count
from models import Options

_MAX_TIMEOUT_S = 600.0

DEFAULT_OPTIONS = Options()
_HEADERS = {row.name.lower().encode(): row for row in (X_TIMEOUT_MS, X_PRIORITY)}


def pairs_of(query: bytes) -> list[tuple[str, str]]:
    """Return the names and values of a query string. Raises INVALID_REQUEST for more than a request may name."""
    checked_count("parameters", query.count(b"&") + 1)
    return parse_qsl(query.decode("latin-1"), keep_blank_values=True)


def read_options(given: Mapping[str, Any]) -> Options:
    """Read options out of strings or numbers by name. Raises INVALID_REQUEST for values out of range, NaN included."""
    if not given:
        return DEFAULT_OPTIONS
    return Options(**{row.name: read(row, given) for row in OPTIONS if row.name in given})


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


def read_headers(headers: Mapping[bytes, bytes]) -> list[Any]:
    """Read a request's timeout in milliseconds and its priority. `headers`: HTTP's or gRPC's metadata, names in lower
    case. Raises INVALID_REQUEST.
    """
    given = [(row, headers.get(name)) for name, row in _HEADERS.items()]
    return [row.default if value is None else read(row, {row.name: value.decode("latin-1")}) for row, value in given]


def deadline_s(started_s: float, timeout_s: float) -> float:
    """Return the deadline of a request begun at `started_s` (`time.monotonic()`): as asked, at most ten minutes."""
    return started_s + min(timeout_s, _MAX_TIMEOUT_S)


def number(given: Mapping[str, Any], name: str, default: float, low: float, high: float) -> float:
    """Read a finite number from `low` to `high`. Raises INVALID_REQUEST."""
    if name not in given:
        return default
    try:
        value = math.nan if isinstance(given[name], bool) else float(given[name])
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
