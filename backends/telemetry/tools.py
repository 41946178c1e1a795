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
- mx-smi: temperatures as quoted; `GPU : 0 %` of --show-usage and `Total ... W` of --show-board-power as public parsers
  read them. Each by a run of its own, as headings would come again.
- ixsmi: the fields of the query as public scripts ask for them; no output was found. Before CoreX 4 power has another
  name there, so it is asked apart.
- xpu-smi, Intel's (some of Kunlun's have the same name; their output is read as no device): `dump` and its header
  `Timestamp, DeviceId, ...` were seen in public text; the metrics' numbers (0 utilisation, 1 power, 2 frequency, 3 and
  4 temperatures of core and memory) are those of the tool's own help.
- mthreads-gmi: no output was found in public text, only that `-q` prints `key : value` lines under headings that begin
  with GPU. The keys are nvidia-smi's, from memory.
"""

from __future__ import annotations

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
    sections,
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
    `otherwise`: what is asked if this tool is missing or fails.
    """

    command: tuple[str, ...]
    parse: Parser
    seldom: bool = False
    output_file: str | None = None
    otherwise: Query | None = None

    def answer(self, tool: Tool) -> Mapping[int, Telemetry]:
        """Run the query. Raises ToolError, unless it is `seldom`."""
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


def _ixsmi(seldom: bool = False, **fields: str) -> Query:
    """Return one query of ixsmi; `fields`: those of Telemetry, each with the tool's name of it."""
    columns = ("index", *fields.values())
    command = ("ixsmi", f"--query-gpu={','.join(columns)}", "--format=csv,noheader,nounits")
    names = {field: (column,) for field, column in fields.items()}
    return Query(command, named(partial(csv_members, columns=columns), **names), seldom)


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
    "metax": tuple(
        Query(("mx-smi", option), named(sections, **{field: (name,)}))
        for option, field, name in (
            ("--show-temperature", "temperature_celsius", "hotspot"),
            ("--show-usage", "utilization_ratio", "GPU"),
            ("--show-board-power", "power_watts", "Total"),
        )
    ),
    "iluvatar": (
        _ixsmi(utilization_ratio="utilization.gpu", temperature_celsius="temperature.gpu"),
        _ixsmi(power_watts="gpu.power.draw", seldom=True),
    ),
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
    "moorethreads": (
        Query(
            ("mthreads-gmi", "-q"),
            named(
                sections,
                utilization_ratio=("Gpu", "GPU Utilization"),
                power_watts=("Power Draw",),
                temperature_celsius=("GPU Current Temp", "Temperature"),
            ),
        ),
    ),
}
