"""Numbers out of what vendors' tools print.

Owns: tolerant reading of figures, CSV lines and the JSON of rocm-smi and its relatives. Must not run anything, and
never raises for odd text: what cannot be read is NaN, or is left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from math import inf, nan
from typing import Any

from backends.contract.backend import Telemetry

_NUMBER = re.compile(r"\s*([-+]?[0-9]+(?:\.[0-9]+)?)\s*(?:%|W|C|°C|℃|MHz|Mhz)?\s*", re.ASCII)
# hy-smi leaves out the comma between two members: "91.0""Average GFX Core Power (W)".
_MISSING_COMMA = re.compile(r'(?<=[^\s:,{"])"\s*"(?=[A-Za-z])')
_BLOCK = re.compile(r"[A-Za-z0-9_]+ \(ue: ([0-9]{1,18}), ce: ([0-9]{1,18})\)", re.ASCII)
_CARD = re.compile(r"card([0-9]{1,4})", re.ASCII)


def number(value: object, low: float = -inf, high: float = inf) -> float:
    """The figure in `value`, with or without its unit (%, W, C, MHz); NaN if it is none or outside low..high."""
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        return nan
    match = _NUMBER.fullmatch(str(value)[:64])
    figure = float(match.group(1)) if match else nan
    return figure if low <= figure <= high and abs(figure) != inf else nan


def telemetry(
    utilization_percent: object = "",
    power_watts: object = "",
    temperature_celsius: object = "",
    *,
    memory_temperature_celsius: object = "",
    clock_mhz: object = "",
) -> Telemetry:
    """From the figures as a tool prints them. What no device can mean (200 %, -1 W, -273.2 C) is unknown."""
    return Telemetry(
        utilization_ratio=number(utilization_percent, 0, 100) / 100,
        power_watts=number(power_watts, 0, 1e5),
        temperature_celsius=number(temperature_celsius, -100, 300),
        memory_temperature_celsius=number(memory_temperature_celsius, -100, 300),
        clock_hertz=number(clock_mhz, 0, 1e5) * 1e6,
    )


def count(value: object) -> float:
    """How often something happened; NaN if `value` does not say."""
    return number(value, 0, 2**53)


def index(value: object) -> int | None:
    """A device's index; None if `value` is none."""
    figure = number(value, 0, 9999)
    return int(figure) if figure == figure // 1 else None


def rows(text: str, separator: str = ",") -> list[list[str]]:
    """The lines that have a separator, as stripped cells."""
    return [[cell.strip() for cell in line.split(separator)] for line in text.splitlines() if separator in line]


def csv_telemetry(text: str) -> dict[int, Telemetry]:
    """Lines of `index, utilisation %, power W, temperature C` without a header -> Telemetry by index."""
    devices: dict[int, Telemetry] = {}
    for cells in rows(text):
        key = index(cells[0])
        if key is not None and len(cells) == 4:
            devices[key] = telemetry(*cells[1:])
    return devices


def json_value(text: str) -> Any:
    """The JSON in `text`, with hy-smi's commas put back where it lacks them; None where it is not JSON."""
    for candidate in (text, _MISSING_COMMA.sub('","', text)):
        try:
            return json.loads(candidate)
        except (ValueError, RecursionError):
            continue
    return None


def first(members: Mapping[str, Any], names: Sequence[str]) -> Any:
    """The member that the first of `names` that is there names, whatever the case; "" if none is."""
    folded = {name.lower(): value for name, value in members.items()}
    return next((folded[name.lower()] for name in names if name.lower() in folded), "")


def cards_telemetry(text: str) -> dict[int, Telemetry]:
    """JSON of rocm-smi or hy-smi, `{"card0": {...}}` -> Telemetry by card. Newer and older key names are read.

    Sources: hy-smi's output as quoted in the tests; rocm-smi's keys of ROCm 5 (`Average ... Power`) and 6 (`Current
    Socket ... Power`), and of its clocks (`(800Mhz)`), as several public parsers read them.
    """
    return {
        card: telemetry(
            first(members, ("GPU use (%)", "HCU use (%)", "DCU use (%)")),
            first(members, ("Average Graphics Package Power (W)", "Current Socket Graphics Package Power (W)")),
            first(members, ("Temperature (Sensor junction) (C)", "Temperature (Sensor edge) (C)")),
            memory_temperature_celsius=first(
                members, ("Temperature (Sensor memory) (C)", "Temperature (Sensor mem) (C)")
            ),
            clock_mhz=str(first(members, ("sclk clock speed:", "sclk clock speed"))).strip("()"),
        )
        for card, members in _cards(text)
    }


def memory_errors(text: str) -> dict[int, tuple[float, float]]:
    """JSON of `hy-smi --showrasinfo`, members `"Block umc is": "ENABLED (ue: 0, ce: 3)"` -> (corrected, uncorrected) by
    card, of all blocks together; a card without such members is left out.
    """
    found = {}
    for card, members in _cards(text):
        blocks = [_BLOCK.fullmatch(str(value)[:80]) for name, value in members.items() if name.startswith("Block ")]
        counts = [(int(block.group(2)), int(block.group(1))) for block in blocks if block]
        if counts:
            found[card] = (float(sum(each[0] for each in counts)), float(sum(each[1] for each in counts)))
    return found


def _cards(text: str) -> list[tuple[int, Mapping[str, Any]]]:
    document = json_value(text)
    return [
        (int(card.group(1)), members)
        for name, members in (document.items() if isinstance(document, dict) else ())
        if (card := _CARD.fullmatch(name)) and isinstance(members, dict)
    ]
