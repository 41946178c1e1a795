"""AMD's telemetry through rocm-smi.

Owns: its command line and output. Not verified on hardware; the options are from memory. amdsmi, the library, is not
used: it must match the driver's libamd_smi.so exactly.
"""

from __future__ import annotations

from backends.contract.backend import Telemetry
from backends.telemetry.parsing import cards_telemetry
from backends.telemetry.tool import Tool


def parse(text: str) -> dict[int, Telemetry]:
    """JSON of `rocm-smi --json` -> Telemetry by card number."""
    return cards_telemetry(text)


def read(tool: Tool) -> dict[int, Telemetry]:
    """By card number. Raises ToolError.

    Neither health nor errors: rocm-smi prints those of its RAS blocks as a table, from which its JSON leaves the cards'
    numbers out.
    """
    return parse(tool.run("rocm-smi", "--showuse", "--showtemp", "--showpower", "--showclocks", "--json"))
