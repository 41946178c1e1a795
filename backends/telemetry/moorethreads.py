"""Moore Threads' telemetry through mthreads-gmi.

Owns: its command line and output. Not verified: no output was found in public text, only that `-q` prints `key : value`
lines under headings that begin with GPU. The keys are nvidia-smi's, from memory; others leave the figure unknown.
"""

from __future__ import annotations

import re

from backends.contract.backend import Telemetry
from backends.telemetry.parsing import first, telemetry
from backends.telemetry.tool import Tool

_HEADING = re.compile(r"GPU\s?[0-9]{1,4}\b.*", re.ASCII)


def parse(text: str) -> dict[int, Telemetry]:
    """`mthreads-gmi -q` -> Telemetry by the order of the headings; of a key that comes twice the first counts."""
    sections: list[dict[str, str]] = []
    for line in text.splitlines():
        key, colon, value = (part.strip() for part in line.partition(":"))
        if _HEADING.fullmatch(line.strip()):
            sections.append({})
        elif sections and colon and value:
            sections[-1].setdefault(key, value)
    return {
        number: telemetry(
            first(members, ("Gpu", "GPU Utilization")),
            first(members, ("Power Draw",)),
            first(members, ("GPU Current Temp", "Temperature")),
        )
        for number, members in enumerate(sections)
    }


def read(tool: Tool) -> dict[int, Telemetry]:
    """By order. Raises ToolError."""
    return parse(tool.run("mthreads-gmi", "-q"))
