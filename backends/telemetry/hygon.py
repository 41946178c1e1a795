"""Hygon's telemetry through hy-smi, whose JSON lacks commas in some versions.

Owns: its command line and output. Not verified on hardware; parsed as quoted in public text.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from math import nan

from backends.contract.backend import Telemetry
from backends.telemetry.parsing import cards_telemetry, memory_errors
from backends.telemetry.tool import Tool

_INSTALLED = "/opt/hyhal/bin/hy-smi"  # Vendor's images have it there and not on PATH


def parse(text: str) -> dict[int, Telemetry]:
    """JSON of `hy-smi --json`, broken or not -> Telemetry by card number."""
    return cards_telemetry(text)


def read(tool: Tool) -> dict[int, Telemetry]:
    """By card number. Asks for no more than this: `--showhcuutil` alone would take a second. Raises ToolError.

    Clocks and errors come by options that older tools may not have, once a minute.
    """
    command = "hy-smi" if shutil.which("hy-smi") else _INSTALLED
    cards = parse(tool.run(command, "--showuse", "--showtemp", "--showpower", "--json"))
    clocks = parse(tool.run_seldom(command, "--showclocks", "--json"))
    errors = memory_errors(tool.run_seldom(command, "--showrasinfo", "all", "--json"))
    return {
        card: replace(
            sample,
            clock_hertz=clocks.get(card, Telemetry()).clock_hertz,
            corrected_memory_errors=errors.get(card, (nan, nan))[0],
            uncorrected_memory_errors=errors.get(card, (nan, nan))[1],
        )
        for card, sample in cards.items()
    }
