"""Output of vendors' tools, and the comparison of telemetry in the tests."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from backends.contract.backend import Telemetry
from backends.telemetry import Tool, reader
from backends.telemetry.tools import TOOLS

OUTPUTS = Path(__file__).parent / "vendor_outputs"
CNMON = {"CnmonInfo": [{"CardNum": "1", "Utilization": {"MLUAverage": "40 %"}, "Temperature": {"Chip": "51"}}]}
GPUSTACK: tuple[dict[str, object], ...] = (
    {"manufacturer": "mthreads", "cores_utilization": 7, "temperature": 45, "power": 250, "power_used": 33.5},
    {"manufacturer": "mthreads", "cores_utilization": 0, "temperature": None, "power": None, "power_used": None},
)
"""Devices as `Device.to_dict` of gpustack-runtime 0.2.6 gives them, in part."""
MAP = """\
\tNPU ID    Chip ID   Chip Logic ID   Chip Phy-ID   Chip Name
\t0         0         0               0             Ascend 910B3
\t0         1         -               -             Mcu
\t3         0         1               3             Ascend 910B3
"""


def quoted(name: str) -> str:
    """Return an output as public text quotes it."""
    return (OUTPUTS / name).read_text(encoding="utf-8")


def parsed(tool: str, text: str) -> Mapping[int, Telemetry]:
    """Parse `text`, the output of a tool's first run."""
    return TOOLS[tool][0].parse(text)


def parsed_otherwise(tool: str, text: str) -> Mapping[int, Telemetry]:
    """Parse `text`, the output of the other tool, which runs where the first one is missing or fails."""
    other = TOOLS[tool][0].otherwise
    assert other is not None
    return other.parse(text)


def read(tool: str, runner: Tool) -> Mapping[int, Telemetry]:
    """Read a tool's telemetry, run by `runner`."""
    return reader(tool)(runner)


def values(sample: Telemetry) -> tuple[float, float, float]:
    return sample.utilization_ratio, sample.power_watts, sample.temperature_celsius


def approx(*figures: float) -> object:
    return pytest.approx(figures, nan_ok=True)
