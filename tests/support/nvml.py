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
        self.__refuses_events = False

    def __call__(self, *xids: int, refuses_events: bool = False) -> FakeNvml:
        """Let these XIDs happen to the first board. Return itself."""
        self.__events += [(0, xid) for xid in xids]
        self.__refuses_events = refuses_events
        return self

    def __len__(self) -> int:
        """Return how often it is open."""
        return self.__open

    def nvmlInit(self) -> None:
        self.__open += 1

    def nvmlShutdown(self) -> None:
        self.__open -= 1

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if index:
            raise self.NVMLError("GPU is lost")
        return index

    def nvmlDeviceGetIndex(self, handle: int) -> int:
        return handle

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(gpu=50, memory=10)

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        raise self.NVMLError("Not Supported")

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: int) -> int:
        return 12_500

    def nvmlDeviceGetTemperature(self, handle: int, sensor: int) -> int:
        return 61

    def nvmlDeviceGetFieldValues(self, handle: int, fields: list[int]) -> list[SimpleNamespace]:
        return [SimpleNamespace(nvmlReturn=0, value=SimpleNamespace(uiVal=88)) for _ in fields]

    def nvmlDeviceGetClockInfo(self, handle: int, kind: int) -> int:
        return 1410

    def nvmlDeviceGetTotalEccErrors(self, handle: int, kind: int, counter: int) -> int:
        return 7 - kind

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: int) -> int:
        return self.nvmlClocksThrottleReasonHwThermalSlowdown | 0x1

    def nvmlDeviceGetRemappedRows(self, handle: int) -> tuple[int, int, int, int]:
        return 1, 1, 1, 0

    def nvmlEventSetCreate(self) -> str:
        if self.__refuses_events:
            raise self.NVMLError("Not Supported")
        return "events"

    def nvmlDeviceRegisterEvents(self, handle: int, kinds: int, events: str) -> None:
        assert (kinds, events) == (self.nvmlEventTypeXidCriticalError, "events")
        assert handle not in self.__registered
        self.__registered.append(handle)

    def nvmlEventSetWait_v2(self, events: str, timeout_ms: int) -> SimpleNamespace:
        if not self.__events:
            raise self.NVMLError("Timeout")
        device, xid = self.__events.pop(0)
        return SimpleNamespace(device=device, eventData=xid)
