"""Telemetry: parsers over quoted outputs and any text, NVML's calls, the sampler, and the metrics."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import isnan, nan

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from anychip_ascend import smi
from app.fleet.device_metrics import DeviceMetrics
from app.observability.metrics import Metrics
from app.worker.messages import Stats
from backends.contract.backend import Telemetry
from backends.telemetry import Sampler, Tool, ToolError, nvidia
from backends.telemetry.sampling import Energy
from backends.telemetry.tools import TOOLS
from tests.support.telemetry import CNMON, GPUSTACK, MAP, FakeNvml, approx, parsed, parsed_otherwise, quoted, values

PARSERS: dict[str, Callable[[str], Mapping[int, Telemetry]]] = {
    "ascend": smi.parse,
    **{f"{name} {number}": query.parse for name, queries in TOOLS.items() for number, query in enumerate(queries)},
    "rocm-smi": partial(parsed_otherwise, "amd"),
}


FIGURES: list[tuple[Callable[[str], Mapping[int, Telemetry]], str, list[tuple[float, float, float]]]] = [
    (smi.parse, quoted("npu-smi-common.txt"), [(0.0, 298.6, 65)]),
    (
        smi.parse,
        "AICORE Usage Rate(%) : 10\nChip ID : 0\nNPU Utilization(%) : 30\nTemperature(C) : N/A\nChip ID : 1\n",
        [(0.1, nan, nan), (0.3, nan, nan)],
    ),
    (partial(parsed, "hygon"), quoted("hy-smi.txt"), [(0.0, 91.0, 57.0)]),
    *(
        (partial(parsed, "hygon"), json.dumps({"card3": {f"{chip} use (%)": "25"}}), [(0.25, nan, nan)])
        for chip in ("DCU", "HCU", "GPU")
    ),
    (partial(parsed, "amd"), quoted("amd-smi.json"), [(1.0, 239, 36), (nan, nan, 54)]),
    (partial(parsed, "amd"), json.dumps(json.loads(quoted("amd-smi.json"))["gpu_data"]), [(1.0, 239, 36)]),
    (partial(parsed_otherwise, "amd"), quoted("rocm-smi.json"), [(1.0, 314.0, 62.0)]),
    (partial(parsed, "intel"), quoted("xpu-smi-dump.txt"), [(nan, nan, nan)]),
    (
        partial(parsed, "intel"),
        "Timestamp, DeviceId, GPU Power (W), GPU Utilization (%)\n06:14:46.000, 1, 120.5, 12.50\n",
        [(0.125, 120.5, nan)],
    ),
    (partial(parsed, "cambricon"), json.dumps(CNMON), [(0.4, nan, 51)]),
    (
        partial(parsed, "moorethreads"),
        json.dumps({f"card{card}": members for card, members in enumerate(GPUSTACK)}),
        [(0.07, 33.5, 45), (0.0, nan, nan)],
    ),
    (partial(parsed, "kunlun"), quoted("xpu_smi-m.txt"), [(0.0, 86.0, 36), (0.0, 86.0, 39)]),
    (partial(parsed, "kunlun"), quoted("xpu_smi-m.txt").replace(" 86 ", " 86500 "), [(0.0, 86.5, 36)]),
    *(
        (
            parse,
            "0, 35, 71.20, 44\n1, [N/A], ERR!, 250 %\n2, 200, -5, 44\ngarbage, 1, 2, 3\n4, 1\n",
            [(0.35, 71.2, 44.0), (nan, nan, 250.0), (nan, nan, 44.0)],
        )
        for parse in (nvidia._SMI[0].parse, TOOLS["biren"][0].parse)
    ),
]
"""Utilization, watts and degrees of the first cards, as each vendor's tool writes them."""


@pytest.mark.parametrize(("parse", "text", "expected"), FIGURES)
def test_what_each_vendors_tool_writes_is_read(
    parse: Callable[[str], Mapping[int, Telemetry]], text: str, expected: list[tuple[float, float, float]]
) -> None:
    found = [values(sample) for sample in parse(text).values()]
    assert found[: len(expected)] == [approx(*figures) for figures in expected]
    assert expected or not found


_JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["card0", "gpu_data", "gpu", "value", "usage", "CnmonInfo", "CardNum", "Temperature", "GPU use (%)"]
            ),
            inner,
        )
    ),
    max_leaves=8,
)
_LINES = st.lists(
    st.text(st.sampled_from("0129.-:,%Wé²٣ \tNaCeinf"), max_size=30)
    | st.sampled_from(["GPU0", "DeviceId, a", "Chip ID : 0", "Temperature(C) : 1e999", "0, 1, 2, inf"]),
    max_size=8,
).map("\n".join)


@pytest.mark.parametrize("name", PARSERS)
@given(text=st.text() | _LINES | _JSON.map(json.dumps))
@example(text="[" * 100_000)
@example(text='{"card0": {"GPU use (%)": ' + "9" * 5000 + "}}")
@example(text="9" * 5000 + ", 1, 2, 3")
def test_no_text_raises_and_no_figure_is_absurd(name: str, text: str) -> None:
    for index, sample in PARSERS[name](text).items():
        assert index >= 0
        assert isnan(sample.utilization_ratio) or 0 <= sample.utilization_ratio <= 1
        assert isnan(sample.power_watts) or sample.power_watts >= 0
    smi.parse_map(text)


def test_nvml_units_and_what_a_board_cannot_say() -> None:
    nvml = FakeNvml()
    devices = nvidia.read_nvml(nvml)
    assert values(devices[0]) == approx(0.5, nan, 61)
    assert devices[0].energy_joules == 12.5
    sample = devices[0]
    assert (sample.memory_temperature_celsius, sample.clock_hertz) == (88, 1.41e9)
    assert (sample.heat_throttled, sample.power_throttled) == (1, 0)
    assert (sample.corrected_memory_errors, sample.uncorrected_memory_errors) == (7, 6)
    assert sample.healthy == 0  # A row waits for a reset to be replaced.
    assert values(devices[1]) == approx(nan, nan, nan)
    assert len(nvml) == 0


def test_what_we_call_of_nvml_exists() -> None:
    pynvml = pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
    for name, ours in vars(FakeNvml).items():
        assert name.startswith("__") or getattr(pynvml, name) == ours or not isinstance(ours, int), name


def test_energy_is_the_area_under_power_without_bridging_gaps() -> None:
    energy = Energy()
    assert isnan(energy.add(0, nan))
    added = [energy.add(*sample) for sample in [(1, 10), (3, 20), (4, nan), (100, 50), (101, 50), (90, 50)]]
    assert added == [0, 30, 30, 30, 80, 80]


def test_a_sampler_keeps_its_energy_and_forgets_the_rest_when_reading_fails(caplog: pytest.LogCaptureFixture) -> None:
    answers: list[dict[int, Telemetry] | Exception] = [
        {0: Telemetry(0.5, 100, nan, 40), 1: Telemetry(energy_joules=7)},
        {0: Telemetry(0.5, 100, nan, 40)},
        OSError("gone"),
        OSError("still gone"),
        {0: Telemetry(0.1, 50, nan, 40), 1: Telemetry(power_watts=10)},
    ]
    now_s = 0.0

    def read(tool: Tool) -> dict[int, Telemetry]:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    telemetry = Sampler(read, Tool(), clock=lambda: now_s)
    telemetry.close()  # No thread: the test samples.
    assert isnan(telemetry.latest(0).power_watts)
    telemetry.sample()
    assert telemetry.latest(1).energy_joules == 7
    now_s = 2.0
    telemetry.sample()
    assert repr(telemetry.latest(0)) == repr(Telemetry(0.5, 100, 200.0, 40))  # NaN is not equal to itself.
    telemetry.sample()
    with caplog.at_level(logging.WARNING):
        telemetry.sample()
    assert isnan(telemetry.latest(0).power_watts)
    assert telemetry.latest(0).energy_joules == 200
    telemetry.sample()
    assert telemetry.latest(0).utilization_ratio == 0.1
    assert isnan(telemetry.latest(1).energy_joules)  # Two ways of counting must not be mixed.
    assert values(telemetry.latest(9)) == approx(nan, nan, nan)


def test_the_thread_samples_away_from_the_caller_and_ends() -> None:
    entered, release, threads = threading.Event(), threading.Event(), []

    class Released(Tool):
        def close(self) -> None:
            release.set()

    def read(tool: Tool, wanted: Sequence[int]) -> dict[int, Telemetry]:
        assert tuple(wanted) == (0,)
        threads.append(threading.current_thread())
        entered.set()
        assert release.wait(30)
        return {0: Telemetry(0.5)}

    telemetry = Sampler(read, Released(), interval_s=60)
    assert isnan(telemetry.latest(0).utilization_ratio)  # While `read` blocks
    assert entered.wait(30)
    assert isnan(telemetry.latest(0).utilization_ratio)
    telemetry.close()
    telemetry.close()
    assert threads[0] is not threading.current_thread()
    assert not threads[0].is_alive()
    assert telemetry.latest(0).utilization_ratio == 0.5


# --- Health, clocks and errors


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


def test_xids_are_counted_and_logged_once_each(caplog: pytest.LogCaptureFixture) -> None:
    nvml = FakeNvml()
    watched = nvidia._watched(nvml)
    assert watched
    assert watched.counted((0,)) == {0: 0}
    nvml(79, 94)
    with caplog.at_level(logging.WARNING):
        assert watched.counted((0, 1)) == {0: 2}  # The second board cannot be watched.
        assert watched.counted((0, 1)) == {0: 2}
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
