"""Counts of XIDs, the errors NVIDIA's driver reports of a GPU, while this process lives.

Owns: NVML's event set. Not run on hardware. In some virtual machines and containers NVML refuses events: then nothing
is known. An XID is logged with its number; NVIDIA's XID catalogue explains it. The number of XIDs is counted.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from functools import cache
from typing import Any

log = logging.getLogger(__name__)

_MOST_AT_ONCE = 1000  # A driver that reports without end must not hold the sampler up.


class Xids:
    """Events of the watched GPUs. NVML stays open: closing it would drop the registrations."""

    def __init__(self, nvml: Any) -> None:
        """Open the event set. Raises NVML's errors if there are no events."""
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


def counted_xids(nvml: Any, wanted: Collection[int]) -> dict[int, float]:
    """Return `Xids.counted` of this process; {} if NVML has no events."""
    xids = _watched(nvml)
    return {} if xids is None else xids.counted(wanted)


@cache
def _watched(nvml: Any) -> Xids | None:
    try:
        return Xids(nvml)
    except nvml.NVMLError as error:
        log.info("XIDs cannot be watched: %s", error)
        return None
