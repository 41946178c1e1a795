"""Hygon's telemetry through hy-smi, whose JSON lacks commas in some versions.

Owns: its command line and output. Not verified on hardware; parsed as quoted in public text.
"""

from __future__ import annotations

import shutil

from backends.backend import Telemetry
from backends.telemetry.parsing import cards_telemetry
from backends.telemetry.tool import Tool

_INSTALLED = "/opt/hyhal/bin/hy-smi"  # Vendor's images have it there and not on PATH


def parse(text: str) -> dict[int, Telemetry]:
    """JSON of `hy-smi --json`, broken or not -> Telemetry by card number."""
    return cards_telemetry(text)


def read(tool: Tool) -> dict[int, Telemetry]:
    """By card number. Asks for no more than this: `--showhcuutil` alone would take a second. Raises ToolError."""
    command = "hy-smi" if shutil.which("hy-smi") else _INSTALLED
    return parse(tool.run(command, "--showuse", "--showtemp", "--showpower", "--json"))
