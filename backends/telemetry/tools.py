"""Tools of vendors, known by their command lines and the names in their output: one row each.

Owns: the rows, and running them. A figure that a tool does not report, or whose name was not found in public, stays
unknown. None was verified on hardware:

- amd-smi: names as several public tests of parsers quote them, for ROCm 6 (a list) and 7 (`gpu_data`). ROCm 10 has no
  rocm-smi any more (rocm.docs.amd.com, rocm_smi_lib 10.1.0), and many images of before have both.
- rocm-smi, where amd-smi is not there or fails: options from memory; keys of ROCm 5 (`Average ... Power`), 6
  (`Current Socket ... Power`) and of its clocks
  (`(800Mhz)`), as several public parsers read them. Neither health nor errors: it prints those of its RAS blocks as a
  table, from which its JSON leaves the cards' numbers out. amdsmi, the library, is not used: it must match the
  driver's libamd_smi.so exactly.
- hy-smi: as quoted in public text. No more is asked at a time: `--showhcuutil` alone would take a second. Clocks and
  errors come by options that older tools may not have.
- brsmi: only the form of the query and `temperature.gpu` were seen in public text; the other fields have nvidia-smi's
  names, which brsmi imitates. A refused field leaves everything unknown.
- cnmon, which writes its JSON into the working directory: names as gpustack/runtime (an older state than the one that
  drives libcndev) reads them. It reads no power; cnmon's names of power, health, errors and clocks were not found.
- xpu_smi, Kunlun's: cells by their order, as quoted of a P800 and as two public parsers read them. Clocks are left out:
  it prints six, and their meanings were not found.
- xpu-smi, Intel's (some of Kunlun's have the same name; their output is read as no device): `dump` and its header
  `Timestamp, DeviceId, ...` were seen in public text; the metrics' numbers (0 utilisation, 1 power, 2 frequency, 3 and
  4 temperatures of core and memory) are those of the tool's own help.
- MetaX, Iluvatar and Moore Threads: no output of mx-smi's usage and power, of ixsmi and of mthreads-gmi was found.
  GPUStack's gpustack-runtime (Apache-2.0, 0.2.6) calls the vendors' own libraries, in a process of its own: where it is
  installed, its figures are taken. It brings kubernetes and docker, so that nobody gets it unasked. It says 0 where a
  utilisation could not be read. It would read others' cards as well, but neither clocks nor errors.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from backends.contract.backend import Telemetry
from backends.telemetry.parsing import (
    Members,
    amd_cards,
    cnmon_cards,
    completed,
    csv_members,
    csv_telemetry,
    json_cards,
    kunlun_cards,
    memory_errors,
    telemetry,
)
from backends.telemetry.tool import Tool, ToolError

Parser = Callable[[str], Mapping[int, Telemetry]]
"""Parser of a tool's output -> Telemetry by the tool's number of the device."""


@dataclass(frozen=True)
class Query:
    """One run of a tool.

    `seldom`: for slow figures, or options that not every version of the tool knows: once a minute; if it fails, these
    figures are missing. `output_file`: the tool's output, if it does not print.
    `otherwise`: what is asked if this tool is missing or fails. `package`: the Python package that the command imports.
    """

    command: tuple[str, ...]
    parse: Parser
    seldom: bool = False
    output_file: str | None = None
    otherwise: Query | None = None
    package: str = ""

    def answer(self, tool: Tool) -> Mapping[int, Telemetry]:
        """Run the query. Raises ToolError, unless it is `seldom`."""
        if self.package and importlib.util.find_spec(self.package) is None:
            raise ToolError(f"Telemetry cannot be read: pip install {self.package.replace('_', '-')}.")
        if self.seldom:
            return self.parse(tool.run_seldom(*self.command))
        try:
            return self.parse(tool.run(*self.command, output_file=self.output_file))
        except ToolError:
            if self.otherwise is None:
                raise
            return self.otherwise.answer(tool)


def read(queries: tuple[Query, ...], tool: Tool) -> dict[int, Telemetry]:
    """Read the devices of the first query, completed by the others, by the tool's own number. Raises ToolError."""
    devices, *others = (query.answer(tool) for query in queries)
    return {
        number: completed(sample, *(each.get(number, Telemetry()) for each in others))
        for number, sample in devices.items()
    }


def named(members_of: Callable[[str], Mapping[int, Members]], **names: tuple[str, ...]) -> Parser:
    """Return a parser of a form of output in which the figures have these names."""
    return lambda text: {number: telemetry(members, names) for number, members in members_of(text).items()}


_CARDS = named(
    json_cards,
    utilization_ratio=("GPU use (%)", "HCU use (%)", "DCU use (%)"),
    power_watts=("Average Graphics Package Power (W)", "Current Socket Graphics Package Power (W)"),
    temperature_celsius=("Temperature (Sensor junction) (C)", "Temperature (Sensor edge) (C)"),
    memory_temperature_celsius=("Temperature (Sensor memory) (C)", "Temperature (Sensor mem) (C)"),
    clock_hertz=("sclk clock speed:", "sclk clock speed"),
)
CSV = "--query-gpu=index,utilization.gpu,power.draw,temperature.gpu", "--format=csv,noheader,nounits"
"""Options of nvidia-smi and its imitations for `csv_telemetry`."""


_GPUSTACK = """
import json, sys
from gpustack_runtime.detector import ManufacturerEnum, detect_devices
found = detect_devices(manufacturer=ManufacturerEnum(sys.argv[1]))
print(json.dumps({f"card{each.index}": each.to_dict() for each in found}))
"""


def _by_gpustack(manufacturer: str) -> tuple[Query, ...]:
    """Return the query of gpustack-runtime for the devices of a manufacturer, by its name there."""
    parse = named(
        json_cards,
        utilization_ratio=("cores_utilization",),
        power_watts=("power_used",),
        temperature_celsius=("temperature",),
    )
    return (Query((sys.executable, "-c", _GPUSTACK, manufacturer), parse, package="gpustack_runtime"),)


TOOLS: Mapping[str, tuple[Query, ...]] = {
    "amd": (
        Query(
            ("amd-smi", "metric", "--json"),
            named(
                amd_cards,
                utilization_ratio=("usage.gfx_activity",),
                power_watts=("power.socket_power",),
                temperature_celsius=("temperature.hotspot", "temperature.edge"),
                memory_temperature_celsius=("temperature.mem",),
                clock_hertz=("clock.gfx_0.clk", "clock.GFX_0.clk"),
                corrected_memory_errors=("ecc.total_correctable_count",),
                uncorrected_memory_errors=("ecc.total_uncorrectable_count",),
            ),
            otherwise=Query(("rocm-smi", "--showuse", "--showtemp", "--showpower", "--showclocks", "--json"), _CARDS),
        ),
    ),
    "hygon": (
        Query(("hy-smi", "--showuse", "--showtemp", "--showpower", "--json"), _CARDS),
        Query(("hy-smi", "--showclocks", "--json"), _CARDS, seldom=True),
        Query(
            ("hy-smi", "--showrasinfo", "all", "--json"),
            named(memory_errors, corrected_memory_errors=("corrected",), uncorrected_memory_errors=("uncorrected",)),
            seldom=True,
        ),
    ),
    "biren": (Query(("brsmi", "gpu", *CSV), csv_telemetry),),
    "cambricon": (
        Query(
            ("cnmon", "info", "-e", "-m", "-u", "-j"),
            named(cnmon_cards, utilization_ratio=("MLUAverage", "MLU Average"), temperature_celsius=("Chip",)),
            output_file="cnmon_info.json",
        ),
    ),
    "intel": (
        Query(
            ("xpu-smi", "dump", "-d", "-1", "-m", "0,1,2,3,4", "-n", "1"),
            named(
                partial(csv_members, key="DeviceId"),
                utilization_ratio=("GPU Utilization",),
                power_watts=("GPU Power",),
                temperature_celsius=("GPU Core Temperature",),
                memory_temperature_celsius=("GPU Memory Temperature",),
                clock_hertz=("GPU Frequency",),
            ),
        ),
    ),
    "metax": _by_gpustack("metax"),
    "iluvatar": _by_gpustack("iluvatar"),
    "moorethreads": _by_gpustack("mthreads"),
    "kunlun": (
        Query(
            ("xpu_smi", "-m"),
            named(
                kunlun_cards,
                utilization_ratio=("utilization",),
                power_watts=("power",),
                temperature_celsius=("temperature",),
            ),
        ),
    ),
}
