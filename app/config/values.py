"""Values of settings that are lists in one line of text, and their checks."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator

from anychip_base.extras import entry_points

CLIENTS = ("image-client", "triton")
"""Clients of other servers that are answered if `compat` names them."""
CLIENT_GROUP = "anychip.clients"
STAGES = ">"
"""Sign between a detector and the classifier of its detections."""
_FIRST_SIZES = "1,2,4,8"
_PART = re.compile(r"(?:\[[^\[\]]*\]|\{[^{}]*\}|[^,])+")


def split(value: str) -> tuple[str, ...]:
    """Return the parts of a comma-separated setting, without blanks; commas in brackets, as of a model's JSON, stay."""
    return tuple(part.strip() for part in _PART.findall(value) if part.strip())


def is_cascade(entry: str) -> bool:
    """Return True if an entry of `models` is a cascade: it has stages, or names a kind that a package brings."""
    from models.contract.cascade import kinds  # Here, as `--help` has to answer at once.

    return STAGES in entry or entry.partition("=")[2].partition(":")[0].strip() in kinds()


def written_in(entry: str) -> Sequence[str]:
    """Return the text of each model of a cascade. Raises ModelError."""
    if STAGES in entry:
        return [stage.partition("?")[0].strip() for stage in entry.partition("=")[2].split(STAGES)]
    from models.contract.cascade import made

    return made(entry).written


def sizes_of(batch_sizes: str) -> tuple[int, ...]:
    """Return the entries of the setting `batch_sizes`; for `auto` the first ones."""
    return tuple(int(size) for size in split(_FIRST_SIZES if batch_sizes == "auto" else batch_sizes))


def _not_empty(value: str) -> str:
    if not split(value):
        raise ValueError("name at least one")
    return value


def _ascending(value: str) -> str:
    if value == "auto":
        return value
    sizes = [int(part) for part in split(value)]
    if not sizes or sizes != sorted(set(sizes)) or sizes[0] < 1:
        raise ValueError("must be auto, or ascending whole numbers from 1 up, such as 1,2,4,8")
    return value


def _with_scheme(value: str) -> str:
    for address in split(value):
        if address != "*" and "://" not in address:
            raise ValueError(f"{address!r} has no scheme, as https://{address} has")
    return value


def _known_clients(value: str) -> str:
    known = (*CLIENTS, *(entry.name for entry in entry_points(CLIENT_GROUP)))
    unknown = [name for name in split(value) if name not in known]
    if unknown:
        raise ValueError(f"{unknown[0]!r} is none of {', '.join(known)}")
    return value


_UNITS = {"MB": 10**6, "GB": 10**9, "MiB": 2**20, "GiB": 2**30}


def memory_of(device_memory: str, total_bytes: int) -> int | None:
    """Return the setting `device_memory` in bytes, for a device of `total_bytes`; None: auto. Raises ValueError."""
    if device_memory == "auto":
        return None
    number = device_memory.rstrip("BGMi")
    value, unit = float(number), device_memory[len(number) :]
    if unit or value > 1:
        return int(value * (_UNITS[unit] if unit else 1))
    return int(value * total_bytes)


def by_version(value: str) -> dict[str, dict[str, str]]:
    """Return the values of `name=version:value,version:value,name=version`, by name and version. Raises ValueError."""
    found: dict[str, dict[str, str]] = {}
    name = ""
    for part in split(value):
        head, equals, rest = part.rpartition("=")
        name = head if equals else name
        version, _, given = rest.partition(":")
        if not name or not version:
            raise ValueError(f"{part!r} names no version, as dogs=2 does")
        found.setdefault(name, {})[version] = given
    return found


def _memory(value: Any) -> Any:
    try:
        found = memory_of(str(value), 1 << 40)
        if found is None or found > 0:
            return str(value)
    except (ValueError, KeyError, OverflowError):
        pass
    raise ValueError("must be auto, a share such as 0.5, or a size such as 800MB or 12GiB")


def _guarded(value: Any) -> Any:
    if value in ("off", "auto"):
        return value
    with contextlib.suppress(ValueError):
        if 0 < float(value) < 1:
            return float(value)
    if not str(value).isdecimal() or not int(value):
        raise ValueError("must be off, auto, a share such as 0.7, or a number of batches")
    return int(value)


def _count_or_auto(value: Any) -> Any:
    if value == "auto":
        return value
    if not str(value).isdecimal() or int(value) > _MOST_INGRESSES:
        raise ValueError(f"must be auto, or a number up to {_MOST_INGRESSES}")
    return int(value)


_MOST_INGRESSES = 32
CommaSeparated = Annotated[
    # A TOML file reads better with a list than with commas in a string.
    str, BeforeValidator(lambda given: ",".join(map(str, given)) if isinstance(given, list | tuple) else given)
]
ModelList = Annotated[CommaSeparated, AfterValidator(_not_empty)]
BatchSizes = Annotated[CommaSeparated, AfterValidator(_ascending)]
Addresses = Annotated[CommaSeparated, AfterValidator(_with_scheme)]
Clients = Annotated[CommaSeparated, AfterValidator(_known_clients)]
DeviceMemory = Annotated[str, BeforeValidator(_memory)]
GuardPolicy = Annotated[Literal["off", "auto"] | int | float, BeforeValidator(_guarded)]
LogLevel = Annotated[Literal["debug", "info", "warning", "error"], BeforeValidator(lambda given: str(given).lower())]
IngressCount = Annotated[Literal["auto"] | int, BeforeValidator(_count_or_auto)]
