"""What devices say of their health, clocks and errors: parsers over quoted outputs, NVML's calls, and the metrics."""

from __future__ import annotations

import logging
from math import isnan

import pytest

from anychip_ascend import smi
from app.fleet.device_metrics import DeviceMetrics
from app.observability.metrics import Metrics
from app.worker.messages import Stats
from backends.telemetry import Tool, ToolError, nvidia
from backends.telemetry.xids import counted_xids
from tests.support.nvml import FakeNvml
from tests.support.telemetry import MAP, quoted


class Recorded(Tool):
    """Answers with recorded outputs, by what the arguments hold; fails for others."""

    def __init__(self, answers: dict[str, str]) -> None:
        self.now_s = 0.0
        super().__init__(clock=lambda: self.now_s)
        self.answers, self.runs = answers, [""]

    def run(self, *command: str, output_file: str | None = None) -> str:
        line = " ".join(command)
        self.runs.append(line)
        for part, text in self.answers.items():
            if part in line:
                return text
        raise ToolError(f"{command[0]} ended with code 1.")


def test_ascend_says_health_memory_temperature_and_errors_of_the_chip_asked_for_once_a_minute() -> None:
    tool = Recorded(
        {
            "-m": MAP,
            "common": quoted("npu-smi-common.txt") + "Aicore curFreq(MHZ) : 800\n",
            "health": quoted("npu-smi-health.txt"),
            "memory": quoted("npu-smi-memory.txt"),
            "ecc": quoted("npu-smi-ecc.txt").replace(
                "Double Bit Error Count               : 0", "Double Bit Error Count : 2"
            ),
        }
    )
    [sample] = smi.read(tool, wanted=(1,)).values()
    assert (sample.healthy, sample.memory_temperature_celsius, sample.clock_hertz) == (1, 63, 8e8)
    assert (sample.corrected_memory_errors, sample.uncorrected_memory_errors) == (0, 2)
    assert isnan(sample.heat_throttled)
    assert "npu-smi info -t health -i 3 -c 0" in tool.runs
    smi.read(tool, wanted=(1,))
    assert sum("health" in run for run in tool.runs) == 1
    tool.now_s = 60.0
    tool.answers["health"] = quoted("npu-smi-health.txt").replace(": OK", ": Alarm")
    assert smi.read(tool, wanted=(1,))[1].healthy == 0


def test_nvml_says_what_slows_a_board_down_and_what_its_memory_has_been_through() -> None:
    sample = nvidia.read_nvml(FakeNvml())[0]
    assert (sample.memory_temperature_celsius, sample.clock_hertz) == (88, 1.41e9)
    assert (sample.heat_throttled, sample.power_throttled) == (1, 0)
    assert (sample.corrected_memory_errors, sample.uncorrected_memory_errors) == (7, 6)
    assert sample.healthy == 0  # A row waits for a reset to be replaced.


def test_nvidia_smi_in_place_of_nvml() -> None:
    line = "0, [N/A], 1410, 3, 0, Not Active, Active, Not Active, Not Active\n1, 60, 1410, [N/A], [N/A], x, x, x, x\n"
    first, second = nvidia.parse_care(line).values()
    assert (first.heat_throttled, first.power_throttled, first.corrected_memory_errors) == (1, 0, 3)
    assert isnan(first.memory_temperature_celsius)
    assert second.memory_temperature_celsius == 60
    assert isnan(second.heat_throttled)
    assert isnan(second.uncorrected_memory_errors)


def test_xids_are_counted_and_logged_once_each(caplog: pytest.LogCaptureFixture) -> None:
    nvml = FakeNvml()
    assert counted_xids(nvml, (0,)) == {0: 0}
    nvml(79, 94)
    with caplog.at_level(logging.WARNING):
        assert counted_xids(nvml, (0, 1)) == {0: 2}  # The second board cannot be watched.
        assert counted_xids(nvml, (0, 1)) == {0: 2}
    assert [record.message for record in caplog.records] == ["GPU 0 reports XID 79", "GPU 0 reports XID 94"]
    nvidia.read_nvml(nvml)
    assert len(nvml) == 1  # Closed, it would forget what it watches.


def test_errors_are_counted_from_the_first_report_and_never_fall() -> None:
    metrics = Metrics()
    device = DeviceMetrics(metrics, "cuda:0", "nvidia")

    def errors(kind: str) -> float | None:
        labels = {"device": "cuda:0", "vendor": "nvidia", "kind": kind}
        return metrics.registry.get_sample_value("anychip_device_memory_errors_total", labels)

    def said(worker: str, count: float) -> None:
        device.report(worker, Stats(0, 0, 0, 0, 0, {"uncorrected_memory_errors": count, "healthy": 1.0}))

    assert errors("uncorrected") is None
    said("first", 40)
    assert errors("uncorrected") == 0
    said("first", 42)
    said("second", 42)  # Takes over.
    said("second", 42)
    device.gone("first", last=False)
    said("second", 43)
    said("second", 0)  # The driver was loaded again.
    assert errors("uncorrected") == 3
    assert errors("corrected") is None


def test_what_no_worker_says_any_more_is_unknown() -> None:
    metrics = Metrics()
    device = DeviceMetrics(metrics, "cuda:0", "nvidia")

    def throttled(reason: str) -> float:
        labels = {"device": "cuda:0", "vendor": "nvidia", "reason": reason}
        return metrics.registry.get_sample_value("anychip_device_throttled", labels) or 0.0

    device.report("w", Stats(0, 0, 0, 0, 0, {"heat_throttled": 1.0}))
    assert throttled("heat") == 1
    assert isnan(throttled("power"))
    device.gone("w", last=True)
    assert isnan(throttled("heat"))
