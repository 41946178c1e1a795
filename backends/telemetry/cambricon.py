"""Cambricon's telemetry through cnmon, which writes its JSON into the working directory.

Owns: its command line and output. Not verified on hardware. Field names as gpustack/runtime (an older state than the
one that drives libcndev) reads them; it reads no power, and how cnmon names that, health, errors and clocks was not
found: they are not known.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from backends.contract.backend import Telemetry
from backends.telemetry.parsing import first, index, json_value, telemetry
from backends.telemetry.tool import Tool

_FILE = "cnmon_info.json"


def parse(text: str) -> dict[int, Telemetry]:
    """The file of `cnmon info -j`, `{"CnmonInfo": [...]}` -> Telemetry by `CardNum`."""
    document = json_value(text)
    cards = first(document, ("CnmonInfo",)) if isinstance(document, dict) else ()
    devices: dict[int, Telemetry] = {}
    for card in cards if isinstance(cards, list) else ():
        number = index(card.get("CardNum")) if isinstance(card, dict) else None
        if number is not None:
            devices[number] = telemetry(
                utilization_percent=first(_members(card, "Utilization"), ("MLUAverage", "MLU Average")),
                temperature_celsius=first(_members(card, "Temperature"), ("Chip",)),
            )
    return devices


def read(tool: Tool) -> dict[int, Telemetry]:
    """By card number. Raises ToolError."""
    return parse(tool.run("cnmon", "info", "-e", "-m", "-u", "-j", output_file=_FILE))


def _members(card: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    members = card.get(name)
    return members if isinstance(members, dict) else {}
