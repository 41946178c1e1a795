"""NVIDIA's telemetry, through NVML where nvidia-ml-py is installed, else through nvidia-smi.

Owns: NVML's calls and units. Must not know CUDA's numbering: indexes are NVML's, and differ from CUDA's where
CUDA_VISIBLE_DEVICES is set; `uuids` tells which is which. The NVML path ran on an H100. XIDs are in xids.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from math import isnan, nan
from typing import Any

from backends.contract.backend import Telemetry
from backends.telemetry.parsing import csv_members, csv_telemetry, telemetry
from backends.telemetry.tool import Tool
from backends.telemetry.tools import CSV, Query
from backends.telemetry.tools import read as read_tool
from backends.telemetry.xids import counted_xids

_TEMPERATURE_GPU = 0
_CARE = (
    "index",
    "temperature.memory",
    "clocks.sm",
    "ecc.errors.corrected.volatile.total",
    "ecc.errors.uncorrected.volatile.total",
    "clocks_throttle_reasons.sw_thermal_slowdown",
    "clocks_throttle_reasons.hw_thermal_slowdown",
    "clocks_throttle_reasons.sw_power_cap",
    "clocks_throttle_reasons.hw_power_brake_slowdown",
)
_FIGURES = {
    "memory_temperature_celsius": (_CARE[1],),
    "clock_hertz": (_CARE[2],),
    "corrected_memory_errors": (_CARE[3],),
    "uncorrected_memory_errors": (_CARE[4],),
}


def parse_care(text: str) -> dict[int, Telemetry]:
    """Parse lines of `--query-gpu` with memory temperature, clocks, errors and throttling, by index."""
    return {
        number: replace(
            telemetry(members, _FIGURES),
            heat_throttled=_active(members[name] for name in _CARE[5:7]),
            power_throttled=_active(members[name] for name in _CARE[7:9]),
        )
        for number, members in csv_members(text, _CARE).items()
    }


_SMI = (  # Energy is never given.
    Query(("nvidia-smi", *CSV), csv_telemetry),
    Query(("nvidia-smi", f"--query-gpu={','.join(_CARE)}", "--format=csv,noheader,nounits"), parse_care, seldom=True),
)


def read(tool: Tool, wanted: Collection[int] = ()) -> Mapping[int, Telemetry]:
    """Read all cards by NVML's index; `wanted`: those to watch for XIDs. Raises ToolError, or NVML's own errors."""
    try:
        import pynvml
    except ImportError:
        return read_tool(_SMI, tool)
    cards = read_nvml(pynvml)
    xids = counted_xids(pynvml, wanted)
    return {number: replace(sample, driver_errors=xids.get(number, nan)) for number, sample in cards.items()}


def read_nvml(nvml: Any) -> dict[int, Telemetry]:
    """Read all cards by NVML's index; each figure on its own, since boards differ. Units: %, mW, mJ, C."""
    nvml.nvmlInit()
    try:
        return {number: _device(nvml, number) for number in range(nvml.nvmlDeviceGetCount())}
    finally:
        nvml.nvmlShutdown()


def uuids(nvml: Any) -> dict[str, int]:
    """Return NVML's index by UUID (`GPU-...`), to find a CUDA device by the UUID in its properties."""
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

    def errors(kind: int) -> float:
        return known(lambda: nvml.nvmlDeviceGetTotalEccErrors(handle, kind, nvml.NVML_VOLATILE_ECC))

    def slowed_by(*reasons: int) -> float:
        active = known(lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))
        return nan if isnan(active) else float(any(int(active) & reason for reason in reasons))

    return Telemetry(
        utilization_ratio=known(lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu) / 100,
        power_watts=known(lambda: nvml.nvmlDeviceGetPowerUsage(handle)) / 1000,
        energy_joules=known(lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(handle)) / 1000,
        temperature_celsius=known(lambda: nvml.nvmlDeviceGetTemperature(handle, _TEMPERATURE_GPU)),
        memory_temperature_celsius=known(lambda: _field(nvml, handle, nvml.NVML_FI_DEV_MEMORY_TEMP)),
        clock_hertz=known(lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)) * 1e6,
        healthy=known(lambda: _row_remapping_works(nvml, handle)),
        heat_throttled=slowed_by(
            nvml.nvmlClocksThrottleReasonSwThermalSlowdown, nvml.nvmlClocksThrottleReasonHwThermalSlowdown
        ),
        power_throttled=slowed_by(
            nvml.nvmlClocksThrottleReasonSwPowerCap, nvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown
        ),
        corrected_memory_errors=errors(nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED),
        uncorrected_memory_errors=errors(nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED),
    )


def _active(cells: Iterable[str]) -> float:
    """Return 1 if any of `Active` and `Not Active` is active, else 0; NaN for other texts of nvidia-smi."""
    said = set(cells)
    return 1.0 if "Active" in said else 0.0 if said == {"Not Active"} else nan


def _field(nvml: Any, handle: Any, field: int) -> float:
    """Return a field's value, which NVML writes as an unsigned integer for a temperature."""
    [value] = nvml.nvmlDeviceGetFieldValues(handle, [field])
    return float(value.value.uiVal) if value.nvmlReturn == nvml.NVML_SUCCESS and value.value.uiVal else nan


def _row_remapping_works(nvml: Any, handle: Any) -> float:
    """Return 1, or 0 if a broken row of memory could not be replaced, or waits for a reset."""
    _, _, waiting, failed = nvml.nvmlDeviceGetRemappedRows(handle)
    return float(not waiting and not failed)
