"""NVML with nvidia-ml-py's interface, as far as it is called; a test compares names and constants with the real one."""

from __future__ import annotations

from types import SimpleNamespace


class FakeNvml:
    """Two boards: the first reports everything but its power, the second is lost."""

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
