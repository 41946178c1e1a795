"""Ascend's telemetry through npu-smi.

Parsed as quoted in public text; health, memory and ECC as in the vendor's npu-smi reference. In a container without
privileges some of those are refused, and stay unknown. Not verified on hardware.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from math import nan

from backends.contract.backend import Telemetry
from backends.telemetry.sampling import Tool, ToolError
from backends.telemetry.tools import completed, first, index, rows, telemetry

_CHIP = {
    "utilization_ratio": ("Aicore Usage Rate(%)", "NPU Utilization(%)"),
    "power_watts": ("NPU Real-time Power(W)", "Power Dissipation(W)"),
    "temperature_celsius": ("Temperature(C)",),
    "clock_hertz": ("Aicore curFreq(MHZ)",),  # "Aicore Freq" is the rated one.
}
_CARE = {
    "memory_temperature_celsius": ("HBM Temperature(C)",),
    "corrected_memory_errors": ("HBM Single Bit Error Count", "DDR Single Bit Error Count"),
    "uncorrected_memory_errors": ("HBM Double Bit Error Count", "DDR Double Bit Error Count"),
}


def parse(text: str) -> dict[int, Telemetry]:
    """Parse `npu-smi info -t common -i N`, lines `key : value`, a `Chip ID` ending a chip's -> Telemetry by chip."""
    chips: dict[int, Telemetry] = {}
    members: dict[str, str] = {}
    for cells in rows(text, ":"):
        if cells[0].lower() == "chip id":
            chip = index(cells[1])
            if chip is not None and members:
                chips[chip] = telemetry(members, _CHIP)
            members = {}
        elif len(cells) == 2:
            members[cells[0]] = cells[1]
    if members and not chips:
        chips[0] = telemetry(members, _CHIP)
    return chips


def parse_map(text: str) -> list[tuple[int, int, int]]:
    """Parse `npu-smi info -m` -> (NPU, chip, logic id) of each chip; rows of a Mcu, without logic id, are left out."""
    chips = []
    for line in text.splitlines():
        npu, chip, logic = (index(cell) for cell in (line.split() + [""] * 3)[:3])
        if npu is not None and chip is not None and logic is not None:
            chips.append((npu, chip, logic))
    return chips


def read(tool: Tool, wanted: Collection[int] = ()) -> dict[int, Telemetry]:
    """Read telemetry by logic id, the driver's number without ASCEND_RT_VISIBLE_DEVICES. Raises ToolError.

    `wanted`: the logic ids to ask for, empty: all. npu-smi needs one run for each NPU, and each worker has a reader.
    """
    if not tool.kept:  # The chips stay the same while a process lives.
        tool.kept = parse_map(tool.run("npu-smi", "info", "-m"))
    chips = [(npu, chip, logic) for npu, chip, logic in tool.kept if not wanted or logic in wanted]
    if not chips:
        raise ToolError("npu-smi info -m names no chip.")
    npus = sorted({npu for npu, _, _ in chips})
    of_npu = {npu: parse(tool.run("npu-smi", "info", "-t", "common", "-i", str(npu))) for npu in npus}
    return {logic: completed(of_npu[npu].get(chip, Telemetry()), _care(tool, npu, chip)) for npu, chip, logic in chips}


def _care(tool: Tool, npu: int, chip: int) -> Telemetry:
    """Return the health, memory temperature and errors of one chip."""
    place = ("-i", str(npu), "-c", str(chip))
    texts = [tool.run_seldom("npu-smi", "info", "-t", kind, *place) for kind in ("health", "memory", "ecc")]
    table = {cells[0]: cells[1] for text in texts for cells in rows(text, ":") if len(cells) == 2}
    status = first(table, ("Health Status", "Health")).upper()
    return replace(telemetry(table, _CARE), healthy=nan if status in ("", "NA", "N/A") else float(status == "OK"))
