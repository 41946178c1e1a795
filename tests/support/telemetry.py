"""Output of vendors' tools, a double of NVML, and the comparison of telemetry in the tests."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest

from backends.contract.backend import Telemetry
from backends.telemetry import Tool
from backends.telemetry.tools import TOOLS, reader

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
    return (OUTPUTS / name).read_text(encoding="utf-8")


def parsed(tool: str, text: str) -> Mapping[int, Telemetry]:
    return TOOLS[tool][0].parse(text)


def parsed_otherwise(tool: str, text: str) -> Mapping[int, Telemetry]:
    """Parse `text`, the output of the other tool, which runs where the first one is missing or fails."""
    other = TOOLS[tool][0].otherwise
    assert other is not None
    return other.parse(text)


def read(tool: str, runner: Tool) -> Mapping[int, Telemetry]:
    return reader(tool)(runner)


def values(sample: Telemetry) -> tuple[float, float, float]:
    return sample.utilization_ratio, sample.power_watts, sample.temperature_celsius


def approx(*figures: float) -> object:
    return pytest.approx(figures, nan_ok=True)


class FakeNvml:
    """NVML with nvidia-ml-py's interface, as far as it is called; a test compares it with the real one.

    Two boards: the first reports everything but its power, the second is lost.
    """

    NVML_SUCCESS = 0
    NVML_VOLATILE_ECC = 0
    NVML_MEMORY_ERROR_TYPE_CORRECTED = 0
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 1
    NVML_CLOCK_SM = 1
    NVML_FI_DEV_MEMORY_TEMP = 82
    nvmlClocksThrottleReasonSwPowerCap = 0x4
    nvmlClocksThrottleReasonSwThermalSlowdown = 0x20
    nvmlClocksThrottleReasonHwThermalSlowdown = 0x40
    nvmlClocksThrottleReasonHwPowerBrakeSlowdown = 0x80
    nvmlEventTypeXidCriticalError = 0x8

    class NVMLError(Exception):
        """Base of all of NVML's errors."""

    def __init__(self) -> None:
        self.__open = 0
        self.__events: list[tuple[int, int]] = []
        self.__registered: list[int] = []

    def __call__(self, *xids: int) -> None:
        """Let these XIDs happen to the first board."""
        self.__events += [(0, xid) for xid in xids]

    def __len__(self) -> int:
        """Return how often it is open."""
        return self.__open

    def nvmlInit(self) -> None:
        self.__open += 1

    def nvmlShutdown(self) -> None:
        self.__open -= 1

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if index:
            raise self.NVMLError("GPU is lost")
        return index

    def nvmlDeviceGetIndex(self, handle: int) -> int:
        return handle

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        raise self.NVMLError("Not Supported")

    def nvmlDeviceGetTotalEccErrors(self, handle: int, kind: int, counter: int) -> int:
        return 7 - kind

    def nvmlDeviceRegisterEvents(self, handle: int, kinds: int, events: str) -> None:
        assert (kinds, events) == (self.nvmlEventTypeXidCriticalError, "events")
        assert handle not in self.__registered
        self.__registered.append(handle)

    def nvmlEventSetWait_v2(self, events: str, timeout_ms: int) -> SimpleNamespace:
        if not self.__events:
            raise self.NVMLError("Timeout")
        device, xid = self.__events.pop(0)
        return SimpleNamespace(device=device, eventData=xid)


_ANSWERS = {
    "nvmlDeviceGetCount": 2,
    "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=50, memory=10),
    "nvmlDeviceGetTotalEnergyConsumption": 12_500,
    "nvmlDeviceGetTemperature": 61,
    "nvmlDeviceGetFieldValues": [SimpleNamespace(nvmlReturn=0, value=SimpleNamespace(uiVal=88))],
    "nvmlDeviceGetClockInfo": 1410,
    "nvmlDeviceGetCurrentClocksThrottleReasons": FakeNvml.nvmlClocksThrottleReasonHwThermalSlowdown | 0x1,
    "nvmlDeviceGetRemappedRows": (1, 1, 1, 0),
    "nvmlEventSetCreate": "events",
}
for _name, _answer in _ANSWERS.items():
    setattr(FakeNvml, _name, lambda self, *_, answer=_answer: answer)
