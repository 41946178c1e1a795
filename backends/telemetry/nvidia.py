"""NVIDIA's telemetry, through NVML where nvidia-ml-py is installed, else through nvidia-smi.

Indexes are NVML's, and differ from CUDA's where CUDA_VISIBLE_DEVICES is set; `uuids` tells which is which. The NVML
path ran on an H100, the watch for XIDs on no hardware: in some virtual machines and containers NVML refuses events.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import cache
from math import isnan, nan
from typing import Any

from backends.contract.backend import Telemetry
from backends.telemetry.sampling import Tool
from backends.telemetry.tools import CSV, Query, csv_telemetry
from backends.telemetry.tools import read as read_tool

log = logging.getLogger(__name__)

_TEMPERATURE_GPU = 0
_SMI = (Query(("nvidia-smi", *CSV), csv_telemetry),)  # Of the figures, the common ones alone.


def read(tool: Tool, wanted: Collection[int] = ()) -> Mapping[int, Telemetry]:
    """Read all cards by NVML's index; `wanted`: those to watch for XIDs. Raises ToolError, or NVML's own errors."""
    try:
        import pynvml
    except ImportError:
        return read_tool(_SMI, tool)
    cards = read_nvml(pynvml)
    watched = _watched(pynvml)
    xids = watched.counted(wanted) if watched else {}
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
        healthy=known(lambda: not any(nvml.nvmlDeviceGetRemappedRows(handle)[2:])),
        heat_throttled=slowed_by(
            nvml.nvmlClocksThrottleReasonSwThermalSlowdown, nvml.nvmlClocksThrottleReasonHwThermalSlowdown
        ),
        power_throttled=slowed_by(
            nvml.nvmlClocksThrottleReasonSwPowerCap, nvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown
        ),
        corrected_memory_errors=errors(nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED),
        uncorrected_memory_errors=errors(nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED),
    )


def _field(nvml: Any, handle: Any, field: int) -> float:
    [value] = nvml.nvmlDeviceGetFieldValues(handle, [field])
    return float(value.value.uiVal) if value.nvmlReturn == nvml.NVML_SUCCESS and value.value.uiVal else nan


_MOST_AT_ONCE = 1000  # A driver that reports without end must not hold the sampler up.


class _Xids:
    """Counts of XIDs, the errors that the driver reports of a GPU, while this process lives.

    NVML stays open: closing it would drop the registrations.
    """

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        nvml.nvmlInit()
        self._events = nvml.nvmlEventSetCreate()
        self._tried: set[int] = set()
        self._counts: dict[int, int] = {}

    def counted(self, wanted: Collection[int]) -> dict[int, float]:
        """Return the number of XIDs so far by NVML's index, for those of `wanted` that can be watched."""
        nvml = self._nvml
        for number in set(wanted) - self._tried:
            self._tried.add(number)
            try:
                handle = nvml.nvmlDeviceGetHandleByIndex(number)
                nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, self._events)
            except nvml.NVMLError as error:
                log.info("XIDs of GPU %d cannot be watched: %s", number, error)
            else:
                self._counts[number] = 0
        for _ in range(_MOST_AT_ONCE if self._counts else 0):
            try:
                event = nvml.nvmlEventSetWait_v2(self._events, 0)
                number = nvml.nvmlDeviceGetIndex(event.device)
            except nvml.NVMLError:  # A timeout: there are no more.
                break
            log.warning("GPU %d reports XID %d", number, event.eventData)
            self._counts[number] = self._counts.get(number, 0) + 1
        return {number: float(count) for number, count in self._counts.items()}


@cache
def _watched(nvml: Any) -> _Xids | None:
    try:
        return _Xids(nvml)
    except nvml.NVMLError as error:
        log.info("XIDs cannot be watched: %s", error)
        return None
