"""Parsing of numbers in the output of vendors' tools.

Owns: tolerant reading of figures, and the forms in which tools print several devices. Must not run anything, and never
raises for odd text: unreadable figures are NaN, or are left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from math import inf, isnan, nan
from typing import Any

from backends.contract.backend import Telemetry

Members = Mapping[str, Any]
"""Output of a tool for one device, by the tool's own names."""
Names = Mapping[str, tuple[str, ...]]
"""Fields of Telemetry, each with the names that tools have for it, the best first."""

_NUMBER = re.compile(r"\s*\(?([-+]?[0-9]+(?:\.[0-9]+)?)\s*(?:%|W|C|°C|℃|MHz|Mhz)?\)?\s*", re.ASCII)
# hy-smi leaves out the comma between two members: "91.0""Average GFX Core Power (W)".
_MISSING_COMMA = re.compile(r'(?<=[^\s:,{"])"\s*"(?=[A-Za-z])')
_BLOCK = re.compile(r"[A-Za-z0-9_]+ \(ue: ([0-9]{1,18}), ce: ([0-9]{1,18})\)", re.ASCII)
_CARD = re.compile(r"card([0-9]{1,4})", re.ASCII)

# The least and the most that a tool can mean (no device is at 200 %, -1 W or -273.2 C), and what makes our unit of it.
_FIGURES = {
    "utilization_ratio": (0, 100, 0.01),
    "power_watts": (0, 1e5, 1),
    "temperature_celsius": (-100, 300, 1),
    "memory_temperature_celsius": (-100, 300, 1),
    "clock_hertz": (0, 1e5, 1e6),
    "corrected_memory_errors": (0, 2**53, 1),
    "uncorrected_memory_errors": (0, 2**53, 1),
}


def number(value: object, low: float = -inf, high: float = inf) -> float:
    """Return the figure in `value`, with or without its unit (%, W, C, MHz); NaN without one, or outside low..high."""
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        return nan
    match = _NUMBER.fullmatch(str(value)[:64])
    figure = float(match.group(1)) if match else nan
    return figure if low <= figure <= high and abs(figure) != inf else nan


def index(value: object) -> int | None:
    """Return a device's index; None if `value` is none."""
    figure = number(value, 0, 9999)
    return int(figure) if figure == figure // 1 else None


def telemetry(members: Members, names: Names) -> Telemetry:
    """Return the figures of one device; NaN for unreadable ones."""
    read: dict[str, float] = {}
    for field, candidates in names.items():
        low, high, factor = _FIGURES[field]
        read[field] = number(first(members, candidates), low, high) * factor
    return Telemetry(**read)


def first(members: Members, names: Sequence[str]) -> Any:
    """Return the member with the first of `names` that is there, whatever the case; "" if none is."""
    folded = {name.lower(): value for name, value in members.items()}
    return next((folded[name.lower()] for name in names if name.lower() in folded), "")


def completed(sample: Telemetry, *others: Telemetry) -> Telemetry:
    """Return the sample, completed with figures that only the others know."""
    for other in others:
        known = {name: value for name, value in asdict(other).items() if not isnan(value)}
        sample = replace(sample, **{name: value for name, value in known.items() if isnan(getattr(sample, name))})
    return sample


def rows(text: str, separator: str = ",") -> list[list[str]]:
    """Return the lines that have a separator, as stripped cells."""
    return [[cell.strip() for cell in line.split(separator)] for line in text.splitlines() if separator in line]


def csv_members(text: str, columns: Sequence[str] = (), key: str = "index") -> dict[int, Members]:
    """Parse lines of cells -> members by the index in the column `key`; the last line of a device counts.

    `columns`: their names; without any, a line with `key` in it has the names, without their units in parentheses.
    """
    devices: dict[int, Members] = {}
    for cells in rows(text):
        if not columns or key in cells:
            columns = [cell.partition(" (")[0] for cell in cells] if key in cells else ()
            continue
        members = dict(zip(columns, cells, strict=True)) if len(cells) == len(columns) else {}
        number = index(members.get(key))
        if number is not None:
            devices[number] = members
    return devices


def csv_telemetry(text: str) -> dict[int, Telemetry]:
    """Parse lines of `index, utilisation %, power W, temperature C` without a header -> Telemetry by index."""
    columns = ("utilization_ratio", "power_watts", "temperature_celsius")
    devices = csv_members(text, ("index", *columns))
    return {number: telemetry(members, {each: (each,) for each in columns}) for number, members in devices.items()}


def kunlun_cards(text: str) -> dict[int, Members]:
    """Parse lines of `xpu_smi -m`, cells without names -> members by the third cell, the card's number.

    Power is in watts on a P800 and in milliwatts on a K200: no card takes 2 kW, and none 2 W.
    """
    devices: dict[int, Members] = {}
    for cells in (line.split() for line in text.splitlines()):
        card = index(cells[2]) if len(cells) > 19 and ":" in cells[0] else None
        if card is not None:
            power = number(cells[8])
            scale = 1000 if power > 2000 else 1
            devices[card] = {"temperature": cells[4], "power": power / scale, "utilization": cells[19]}
    return devices


def json_value(text: str) -> Any:
    """Return the JSON in `text`, after putting back commas that hy-smi leaves out; None if it is not JSON."""
    for candidate in (text, _MISSING_COMMA.sub('","', text)):
        try:
            return json.loads(candidate)
        except (ValueError, RecursionError):
            continue
    return None


def json_cards(text: str) -> dict[int, Members]:
    """Parse JSON of rocm-smi or hy-smi, `{"card0": {...}}` -> members by card."""
    document = json_value(text)
    return {
        int(card.group(1)): members
        for name, members in (document.items() if isinstance(document, dict) else ())
        if (card := _CARD.fullmatch(name)) and isinstance(members, dict)
    }


def amd_cards(text: str) -> dict[int, Members]:
    """JSON of `amd-smi metric`, a list of cards (ROCm 6) or `{"gpu_data": [...]}` (7 and 10) -> members by `gpu`.

    A member is called by its path, `temperature.hotspot`; of `{"value": 37, "unit": "C"}` it is the value.
    "N/A" is none.
    """
    document = json_value(text)
    cards = document.get("gpu_data") if isinstance(document, dict) else document
    return {
        number: dict(_paths(card))
        for card in (cards if isinstance(cards, list) else ())
        if isinstance(card, dict) and (number := index(card.get("gpu"))) is not None
    }


def _paths(members: Mapping[str, Any], before: str = "", depth: int = 3) -> Iterator[tuple[str, Any]]:
    for name, value in members.items():
        figure = value.get("value", value) if isinstance(value, dict) else value
        if isinstance(figure, dict):
            yield from _paths(figure, f"{before}{name}.", depth - 1) if depth else ()
        elif figure != "N/A":
            yield before + name, figure


def memory_errors(text: str) -> dict[int, Members]:
    """Parse JSON of `hy-smi --showrasinfo`, members `"Block umc is": "ENABLED (ue: 0, ce: 3)"` -> sums over all blocks,
    `corrected` and `uncorrected`, by card; a card without such members is left out.
    """
    found: dict[int, Members] = {}
    for card, members in json_cards(text).items():
        values = (str(value)[:80] for name, value in members.items() if name.startswith("Block "))
        counts = [(int(block.group(1)), int(block.group(2))) for value in values if (block := _BLOCK.fullmatch(value))]
        if counts:
            uncorrected, corrected = (sum(column) for column in zip(*counts, strict=True))
            found[card] = {"corrected": corrected, "uncorrected": uncorrected}
    return found


def cnmon_cards(text: str) -> dict[int, Members]:
    """Parse the file of `cnmon info -j`, `{"CnmonInfo": [...]}` -> members of a card's groups by `CardNum`."""
    document = json_value(text)
    cards = first(document, ("CnmonInfo",)) if isinstance(document, dict) else ()
    devices: dict[int, Members] = {}
    for card in cards if isinstance(cards, list) else ():
        number = index(card.get("CardNum")) if isinstance(card, dict) else None
        if number is not None:
            groups = (card.get(name) for name in ("Utilization", "Temperature"))
            devices[number] = dict(pair for group in groups if isinstance(group, dict) for pair in group.items())
    return devices
