"""NVIDIA's telemetry, through NVML where nvidia-ml-py is installed, else through nvidia-smi.

Owns: NVML's calls and units. Must not know CUDA's numbering: indexes are NVML's, and differ from CUDA's where
CUDA_VISIBLE_DEVICES is set; `uuids` tells which is which. The NVML path was not run on hardware.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import nan
from typing import Any

from backends.backend import Telemetry
from backends.telemetry.parsing import csv_telemetry
from backends.telemetry.tool import Tool

_TEMPERATURE_GPU = 0


def parse(text: str) -> dict[int, Telemetry]:
    """Lines of `--query-gpu=index,utilization.gpu,power.draw,temperature.gpu`; energy is never given."""
    return csv_telemetry(text)


def read(tool: Tool) -> Mapping[int, Telemetry]:
    """By NVML's index. Raises ToolError, or NVML's own errors (subclasses of Exception)."""
    try:
        import pynvml
    except ImportError:
        fields = "index,utilization.gpu,power.draw,temperature.gpu"
        return parse(tool.run("nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"))
    return read_nvml(pynvml)


def read_nvml(nvml: Any) -> dict[int, Telemetry]:
    """By NVML's index; each figure on its own, since boards differ in what they can say. Units: %, mW, mJ, C."""
    nvml.nvmlInit()
    try:
        return {number: _device(nvml, number) for number in range(nvml.nvmlDeviceGetCount())}
    finally:
        nvml.nvmlShutdown()


def uuids(nvml: Any) -> dict[str, int]:
    """NVML's index by UUID (`GPU-...`), to find a CUDA device by the UUID in its properties."""
    nvml.nvmlInit()
    try:
        found = {}
        for number in range(nvml.nvmlDeviceGetCount()):
            uuid = nvml.nvmlDeviceGetUUID(nvml.nvmlDeviceGetHandleByIndex(number))
            found[uuid.decode() if isinstance(uuid, bytes) else uuid] = number
        return found
    finally:
        nvml.nvmlShutdown()


def _device(nvml: Any, number: int) -> Telemetry:
    def known(value: Callable[[], float]) -> float:
        try:
            return float(value())
        except nvml.NVMLError:
            return nan

    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(number)
    except nvml.NVMLError:
        return Telemetry()  # One lost board must not hide the others
    return Telemetry(
        utilization_ratio=known(lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu) / 100,
        power_watts=known(lambda: nvml.nvmlDeviceGetPowerUsage(handle)) / 1000,
        energy_joules=known(lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(handle)) / 1000,
        temperature_celsius=known(lambda: nvml.nvmlDeviceGetTemperature(handle, _TEMPERATURE_GPU)),
    )
