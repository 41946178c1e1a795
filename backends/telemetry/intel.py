"""Intel's telemetry through xpu-smi (Kunlun's tool has the same name; its output is read as no device).

Owns: its command line and output. Not verified on hardware: `dump` and its header `Timestamp, DeviceId, ...` were seen
in public text; the metrics' numbers (0 utilisation, 1 power, 2 frequency, 3 and 4 temperatures of core and memory) are
those of the tool's own help. Columns are found by their header, so that another order reads right.
"""

from __future__ import annotations

from backends.contract.backend import Telemetry
from backends.telemetry.parsing import index, rows, telemetry
from backends.telemetry.tool import Tool


def parse(text: str) -> dict[int, Telemetry]:
    """`xpu-smi dump`: a header and lines with commas -> Telemetry by `DeviceId`; the last line of a device counts."""
    header: list[str] = []
    devices: dict[int, Telemetry] = {}
    for cells in rows(text):
        if "DeviceId" in cells:
            header = cells
            continue
        members = dict(zip(header, cells, strict=True)) if len(cells) == len(header) else {}
        number = index(members.get("DeviceId"))
        if number is not None:
            devices[number] = telemetry(
                _column(members, "GPU Utilization"),
                _column(members, "GPU Power"),
                _column(members, "GPU Core Temperature"),
                memory_temperature_celsius=_column(members, "GPU Memory Temperature"),
                clock_mhz=_column(members, "GPU Frequency"),
            )
    return devices


def read(tool: Tool) -> dict[int, Telemetry]:
    """By the tool's device id. Raises ToolError."""
    return parse(tool.run("xpu-smi", "dump", "-d", "-1", "-m", "0,1,2,3,4", "-n", "1"))


def _column(members: dict[str, str], start: str) -> str:
    return next((value for name, value in members.items() if name.startswith(start)), "")
