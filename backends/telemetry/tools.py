"""Tools of vendors, known by their command lines and the names in their output: one row each.

Parsing is tolerant and never raises: a figure that cannot be read, that a tool does not report, or whose name was not
found in public, stays unknown (NaN). None was verified on hardware:

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

import importlib
import importlib.util
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import inf, isnan, nan
from typing import Any

from anychip_base.interpreter import python_command
from backends.contract.backend import Telemetry
from backends.telemetry.sampling import Tool, ToolError

Members = Mapping[str, Any]
"""Output of a tool for one device, by the tool's own names."""
Names = Mapping[str, tuple[str, ...]]
"""Fields of Telemetry, each with the names that tools have for it, the best first."""

_NUMBER = re.compile(r"\s*\(?([-+]?[0-9]+(?:\.[0-9]+)?)\s*(?:%|W|C|°C|℃|MHz|Mhz)?\)?\s*", re.ASCII)
# hy-smi leaves out the comma between two members: "91.0""Average GFX Core Power (W)".
_MISSING_COMMA = re.compile(r'(?<=[^\s:,{"])"\s*"(?=[A-Za-z])')
_BLOCK = re.compile(r"[A-Za-z0-9_]+ \(ue: ([0-9]{1,18}), ce: ([0-9]{1,18})\)", re.ASCII)
_CARD = re.compile(r"card([0-9]{1,4})", re.ASCII)

# The least and the most that a tool can mean (no device is at 200 %, -1 W or -273.2 C), and what makes our unit of it.
_FIGURES = {
    "utilization_ratio": (0, 100, 0.01),
    "power_watts": (0, 1e5, 1),
    "temperature_celsius": (-100, 300, 1),
    "memory_temperature_celsius": (-100, 300, 1),
    "clock_hertz": (0, 1e5, 1e6),
    "corrected_memory_errors": (0, 2**53, 1),
    "uncorrected_memory_errors": (0, 2**53, 1),
}


def number(value: object, low: float = -inf, high: float = inf) -> float:
    """Return the figure in `value`, with or without its unit (%, W, C, MHz); NaN without one, or outside low..high."""
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        return nan
    match = _NUMBER.fullmatch(str(value)[:64])
    figure = float(match.group(1)) if match else nan
    return figure if low <= figure <= high and abs(figure) != inf else nan


def index(value: object) -> int | None:
    """Return a device's index; None if `value` is none."""
    figure = number(value, 0, 9999)
    return int(figure) if figure == figure // 1 else None


def telemetry(members: Members, names: Names) -> Telemetry:
    """Return the figures of one device; NaN for unreadable ones."""
    read: dict[str, float] = {}
    for field, candidates in names.items():
        low, high, factor = _FIGURES[field]
        read[field] = number(first(members, candidates), low, high) * factor
    return Telemetry(**read)


def first(members: Members, names: Sequence[str]) -> Any:
    """Return the member with the first of `names` that is there, whatever the case; "" if none is."""
    folded = {name.lower(): value for name, value in members.items()}
    return next((folded[name.lower()] for name in names if name.lower() in folded), "")


def completed(sample: Telemetry, *others: Telemetry) -> Telemetry:
    """Return the sample, completed with figures that only the others know."""
    for other in others:
        known = {name: value for name, value in asdict(other).items() if not isnan(value)}
        sample = replace(sample, **{name: value for name, value in known.items() if isnan(getattr(sample, name))})
    return sample


def rows(text: str, separator: str = ",") -> list[list[str]]:
    """Return the lines that have a separator, as stripped cells."""
    return [[cell.strip() for cell in line.split(separator)] for line in text.splitlines() if separator in line]


def csv_members(text: str, columns: Sequence[str] = (), key: str = "index") -> dict[int, Members]:
    """Parse lines of cells -> members by the index in the column `key`; the last line of a device counts.

    `columns`: their names; without any, a line with `key` in it has the names, without their units in parentheses.
    """
    devices: dict[int, Members] = {}
    for cells in rows(text):
        if not columns or key in cells:
            columns = [cell.partition(" (")[0] for cell in cells] if key in cells else ()
            continue
        members = dict(zip(columns, cells, strict=True)) if len(cells) == len(columns) else {}
        number = index(members.get(key))
        if number is not None:
            devices[number] = members
    return devices


def kunlun_cards(text: str) -> dict[int, Members]:
    """Parse lines of `xpu_smi -m`, cells without names -> members by the third cell, the card's number.

    Power is in watts on a P800 and in milliwatts on a K200: no card takes 2 kW, and none 2 W.
    """
    devices: dict[int, Members] = {}
    for cells in (line.split() for line in text.splitlines()):
        card = index(cells[2]) if len(cells) > 19 and ":" in cells[0] else None
        if card is not None:
            power = number(cells[8])
            scale = 1000 if power > 2000 else 1
            devices[card] = {"temperature": cells[4], "power": power / scale, "utilization": cells[19]}
    return devices


def json_value(text: str) -> Any:
    """Return the JSON in `text`, after putting back commas that hy-smi leaves out; None if it is not JSON."""
    for candidate in (text, _MISSING_COMMA.sub('","', text)):
        try:
            return json.loads(candidate)
        except (ValueError, RecursionError):
            continue
    return None


def json_cards(text: str) -> dict[int, Members]:
    """Parse JSON of rocm-smi or hy-smi, `{"card0": {...}}` -> members by card."""
    document = json_value(text)
    return {
        int(card.group(1)): members
        for name, members in (document.items() if isinstance(document, dict) else ())
        if (card := _CARD.fullmatch(name)) and isinstance(members, dict)
    }


def amd_cards(text: str) -> dict[int, Members]:
    """JSON of `amd-smi metric`, a list of cards (ROCm 6) or `{"gpu_data": [...]}` (7 and 10) -> members by `gpu`.

    A member is called by its path, `temperature.hotspot`; of `{"value": 37, "unit": "C"}` it is the value.
    "N/A" is none.
    """
    document = json_value(text)
    cards = document.get("gpu_data") if isinstance(document, dict) else document
    return {
        number: dict(_paths(card))
        for card in (cards if isinstance(cards, list) else ())
        if isinstance(card, dict) and (number := index(card.get("gpu"))) is not None
    }


def _paths(members: Mapping[str, Any], before: str = "", depth: int = 3) -> Iterator[tuple[str, Any]]:
    for name, value in members.items():
        figure = value.get("value", value) if isinstance(value, dict) else value
        if isinstance(figure, dict):
            yield from _paths(figure, f"{before}{name}.", depth - 1) if depth else ()
        elif figure != "N/A":
            yield before + name, figure


def memory_errors(text: str) -> dict[int, Members]:
    """Parse JSON of `hy-smi --showrasinfo`, members `"Block umc is": "ENABLED (ue: 0, ce: 3)"` -> sums over all blocks,
    `corrected` and `uncorrected`, by card; a card without such members is left out.
    """
    found: dict[int, Members] = {}
    for card, members in json_cards(text).items():
        values = (str(value)[:80] for name, value in members.items() if name.startswith("Block "))
        counts = [(int(block.group(1)), int(block.group(2))) for value in values if (block := _BLOCK.fullmatch(value))]
        if counts:
            uncorrected, corrected = (sum(column) for column in zip(*counts, strict=True))
            found[card] = {"corrected": corrected, "uncorrected": uncorrected}
    return found


def cnmon_cards(text: str) -> dict[int, Members]:
    """Parse the file of `cnmon info -j`, `{"CnmonInfo": [...]}` -> members of a card's groups by `CardNum`."""
    document = json_value(text)
    cards = first(document, ("CnmonInfo",)) if isinstance(document, dict) else ()
    devices: dict[int, Members] = {}
    for card in cards if isinstance(cards, list) else ():
        number = index(card.get("CardNum")) if isinstance(card, dict) else None
        if number is not None:
            groups = (card.get(name) for name in ("Utilization", "Temperature"))
            devices[number] = dict(pair for group in groups if isinstance(group, dict) for pair in group.items())
    return devices


Parser = Callable[[str], Mapping[int, Telemetry]]
"""Parser of a tool's output -> Telemetry by the tool's number of the device."""


@dataclass(frozen=True)
class Query:
    """One run of a tool.

    `seldom`: for slow figures, or options that not every version of the tool knows: once a minute; if it fails, these
    figures are missing. `output_file`: the tool's output, if it does not print.
    `otherwise`: what is asked if this tool is missing or fails. `package`: a Python package; the command is then
    of a Python that imports it.
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
        command = python_command(*self.command) if self.package else self.command
        if self.seldom:
            return self.parse(tool.run_seldom(*command))
        try:
            return self.parse(tool.run(*command, output_file=self.output_file))
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


csv_telemetry = named(
    partial(csv_members, columns=("index", "utilisation", "power", "temperature")),
    utilization_ratio=("utilisation",),
    power_watts=("power",),
    temperature_celsius=("temperature",),
)
"""Parse lines of `index, utilisation %, power W, temperature C` without a header -> Telemetry by index."""
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
    parse = named(
        json_cards,
        utilization_ratio=("cores_utilization",),
        power_watts=("power_used",),
        temperature_celsius=("temperature",),
    )
    return (Query(("-c", _GPUSTACK, manufacturer), parse, package="gpustack_runtime"),)


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


def reader(name: str) -> Callable[..., Mapping[int, Telemetry]]:
    """Return `read(tool)` for the name in a vendor's row: a tool, a module here, or a dotted name of another's.

    It may have a parameter `wanted`: the numbers of the devices to ask for, none for all.

    Raises ImportError.
    """
    if name in TOOLS:
        return partial(read, TOOLS[name])
    module = importlib.import_module(name if "." in name else f"backends.telemetry.{name}")
    of_module: Callable[..., Mapping[int, Telemetry]] = module.read
    return of_module
