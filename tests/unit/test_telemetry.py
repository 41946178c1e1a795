"""Telemetry: parsers over quoted outputs and any text; the sampler over tools that misbehave, as real processes."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Mapping
from functools import partial
from math import isnan, nan
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from anychip_ascend import smi
from backends.contract.backend import Telemetry
from backends.telemetry import (
    Sampler,
    nvidia,
)
from backends.telemetry.parsing import csv_telemetry
from backends.telemetry.sampler import Energy
from backends.telemetry.tools import TOOLS
from tests.support.nvml import FakeNvml
from tests.support.telemetry import CNMON, MAP, OUTPUTS, approx, parsed, parsed_otherwise, values

PARSERS: dict[str, Callable[[str], Mapping[int, Telemetry]]] = {
    "ascend": smi.parse,
    "nvidia care": nvidia.parse_care,
    **{f"{name} {number}": query.parse for name, queries in TOOLS.items() for number, query in enumerate(queries)},
    "rocm-smi": partial(parsed_otherwise, "amd"),
}


def quoted(name: str) -> str:
    return (OUTPUTS / name).read_text(encoding="utf-8")


def test_every_quoted_output_is_tested_and_has_a_source() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in Path(__file__).parent.glob("test_*.py"))
    sources = quoted("README.md")
    for path in OUTPUTS.iterdir():
        assert path.name == "README.md" or (f'quoted("{path.name}")' in text and f"`{path.name}`" in sources)


def test_ascend_as_quoted() -> None:
    (sample,) = smi.parse(quoted("npu-smi-common.txt")).values()
    assert values(sample) == approx(0.0, 298.6, 65)
    assert isnan(sample.energy_joules)


def test_ascend_tells_the_chips_of_a_card_apart() -> None:
    text = "AICORE Usage Rate(%) : 10\nChip ID : 0\nNPU Utilization(%) : 30\nTemperature(C) : N/A\nChip ID : 1\n"
    assert [values(sample) for sample in smi.parse(text).values()] == [approx(0.1, nan, nan), approx(0.3, nan, nan)]


def test_ascend_reads_the_map_without_the_mcu() -> None:
    assert smi.parse_map(MAP) == [(0, 0, 0), (3, 0, 1)]


def test_hygon_as_quoted_without_commas() -> None:
    with pytest.raises(ValueError, match="delimiter"):
        json.loads(quoted("hy-smi.txt"))
    assert values(parsed("hygon", quoted("hy-smi.txt"))[0]) == approx(0.0, 91.0, 57.0)


@pytest.mark.parametrize("name", ["DCU use (%)", "HCU use (%)", "GPU use (%)"])
def test_hygon_under_each_name(name: str) -> None:
    assert parsed("hygon", json.dumps({"card3": {name: "25"}}))[3].utilization_ratio == 0.25


def test_amd_as_quoted() -> None:
    devices = parsed("amd", quoted("amd-smi.json"))
    assert [values(devices[card]) for card in (0, 1)] == [approx(1.0, 239, 36), approx(nan, nan, 54)]
    assert (devices[0].clock_hertz, devices[0].memory_temperature_celsius) == (132e6, 42)
    assert (devices[0].corrected_memory_errors, devices[0].uncorrected_memory_errors) == (0, 0)
    of_rocm_6 = json.dumps(json.loads(quoted("amd-smi.json"))["gpu_data"])
    assert values(parsed("amd", of_rocm_6)[0]) == approx(1.0, 239, 36)


def test_amd_before_rocm_10_as_quoted() -> None:
    assert values(parsed_otherwise("amd", quoted("rocm-smi.json"))[0]) == approx(1.0, 314.0, 62.0)
    text = '{"card1": {"Current Socket Graphics Package Power (W)": "97.0"}, "system": {"Driver version": "6.3.6"}}'
    assert {card: values(sample) for card, sample in parsed_otherwise("amd", text).items()} == {
        1: approx(nan, 97.0, nan)
    }


def test_intel_finds_columns_by_their_header() -> None:
    assert values(parsed("intel", quoted("xpu-smi-dump.txt"))[0]) == approx(nan, nan, nan)
    text = "Timestamp, DeviceId, GPU Power (W), GPU Utilization (%)\n06:14:46.000, 1, 120.5, 12.50\n"
    assert values(parsed("intel", text)[1]) == approx(0.125, 120.5, nan)


def test_cambricon_reads_its_file() -> None:
    assert values(parsed("cambricon", json.dumps(CNMON))[1]) == approx(0.4, nan, 51)


def test_moore_threads_reads_sections() -> None:
    text = "Driver : 2.7\nGPU0 00000000:3b:00.0\n  Gpu : 7%\n  Power Draw : 33.5W\n  GPU Current Temp : 45C\nGPU1\n"
    devices = parsed("moorethreads", text)
    assert values(devices[0]) == approx(0.07, 33.5, 45)
    assert values(devices[1]) == approx(nan, nan, nan)


def test_metax_reads_sections_of_a_run_each() -> None:
    temperature, usage, power = (query.parse for query in TOOLS["metax"])
    degrees = [sample.temperature_celsius for sample in temperature(quoted("mx-smi-temperature.txt")).values()]
    assert degrees == [39.0, 39.25]
    heading = "Attached GPUs : 1\nGPU#0  MXC500  0000:08:00.0\n"
    assert usage(f"{heading}    GPU        : 7 %\n    VPUE       : 9 %\n")[0].utilization_ratio == 0.07
    assert power(f"{heading}    Total      : 80.25 W\n")[0].power_watts == 80.25


def test_kunlun_reads_cells_and_either_unit_of_power() -> None:
    devices = parsed("kunlun", quoted("xpu_smi-m.txt"))
    assert [values(devices[card]) for card in (0, 1)] == [approx(0.0, 86.0, 36), approx(0.0, 86.0, 39)]
    milliwatts = quoted("xpu_smi-m.txt").replace(" 86 ", " 86500 ")
    assert parsed("kunlun", milliwatts)[0].power_watts == 86.5


def test_iluvatar_answers_the_fields_it_was_asked() -> None:
    figures, power = (query.parse for query in TOOLS["iluvatar"])
    assert values(figures("0, 35, 44\n1, [N/A], 51\n")[0]) == approx(0.35, nan, 44)
    assert power("0, 71.20\n")[0].power_watts == 71.2
    assert power("Field gpu.power.draw is not a valid field to query.\n") == {}


@pytest.mark.parametrize("parse", [nvidia._SMI[0].parse, TOOLS["biren"][0].parse, csv_telemetry])
def test_lines_with_commas(parse: Callable[[str], Mapping[int, Telemetry]]) -> None:
    devices = parse("0, 35, 71.20, 44\n1, [N/A], ERR!, 250 %\n2, 200, -5, 44\ngarbage, 1, 2, 3\n4, 1\n")
    assert [values(devices[index]) for index in range(3)] == [
        approx(0.35, 71.2, 44),
        approx(nan, nan, 250),
        approx(nan, nan, 44),
    ]
    assert set(devices) == {0, 1, 2}


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
    assert values(devices[1]) == approx(nan, nan, nan)
    assert len(nvml) == 0


def test_what_we_call_of_nvml_exists() -> None:
    pynvml = pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
    for name in dir(FakeNvml):
        assert name.startswith("__") or hasattr(pynvml, name)
        if isinstance(getattr(FakeNvml, name), int):
            assert getattr(pynvml, name) == getattr(FakeNvml, name), name


def test_energy_is_the_area_under_power_without_bridging_gaps() -> None:
    energy = Energy()
    assert isnan(energy.add(0, nan))
    added = [energy.add(*sample) for sample in [(1, 10), (3, 20), (4, nan), (100, 50), (101, 50), (90, 50)]]
    assert added == [0, 30, 30, 30, 80, 80]


@given(st.lists(st.tuples(st.floats(-10, 1e6), st.floats())))
def test_energy_never_falls(samples: list[tuple[float, float]]) -> None:
    energy, known = Energy(), 0.0
    for now_s, watts in samples:
        joules = energy.add(now_s, watts)
        assert isnan(joules) or joules >= known
        known = known if isnan(joules) else joules


def test_a_sampler_keeps_its_energy_and_forgets_the_rest_when_reading_fails(caplog: pytest.LogCaptureFixture) -> None:
    answers: list[dict[int, Telemetry] | Exception] = [
        {0: Telemetry(0.5, 100, nan, 40), 1: Telemetry(energy_joules=7)},
        {0: Telemetry(0.5, 100, nan, 40)},
        OSError("gone"),
        OSError("still gone"),
        {0: Telemetry(0.1, 50, nan, 40), 1: Telemetry(power_watts=10)},
    ]
    now_s = 0.0

    def read() -> dict[int, Telemetry]:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    telemetry = Sampler(read, clock=lambda: now_s)
    telemetry.close()  # No thread: the test samples.
    assert isnan(telemetry.latest(0).power_watts)
    telemetry.sample()
    assert telemetry.latest(1).energy_joules == 7
    now_s = 2.0
    telemetry.sample()
    assert telemetry.latest(0) == Telemetry(0.5, 100, 200, 40)
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

    def read() -> dict[int, Telemetry]:
        threads.append(threading.current_thread())
        entered.set()
        assert release.wait(30)
        return {0: Telemetry(0.5)}

    telemetry = Sampler(read, interval_s=60, cancel=release.set)
    assert isnan(telemetry.latest(0).utilization_ratio)  # While `read` blocks
    assert entered.wait(30)
    assert isnan(telemetry.latest(0).utilization_ratio)
    telemetry.close()
    telemetry.close()
    assert threads[0] is not threading.current_thread()
    assert not threads[0].is_alive()
    assert telemetry.latest(0).utilization_ratio == 0.5
