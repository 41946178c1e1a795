"""Biren's telemetry through brsmi.

Owns: its command line and output. Not verified: of the query only the form and `temperature.gpu` were seen in public
text; the other fields are named as nvidia-smi's, whose likeness brsmi is. A refused field leaves everything unknown.
"""

from __future__ import annotations

from backends.contract.backend import Telemetry
from backends.telemetry.parsing import csv_telemetry
from backends.telemetry.tool import Tool

_FIELDS = "index,utilization.gpu,power.draw,temperature.gpu"


def parse(text: str) -> dict[int, Telemetry]:
    """CSV lines without header: index, %, W, C."""
    return csv_telemetry(text)


def read(tool: Tool) -> dict[int, Telemetry]:
    """By card number. Raises ToolError."""
    return parse(tool.run("brsmi", "gpu", f"--query-gpu={_FIELDS}", "--format=csv,noheader,nounits"))
