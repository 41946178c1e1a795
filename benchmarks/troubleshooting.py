"""Tables of docs/troubleshooting.md, made of those that the commands use.

    python -m benchmarks.troubleshooting

Owns: their form; the rest of the page is written by hand. Must not have a remedy of its own: those are in
anychip_tools.remedies, anychip_tools.compatibility and the vendors' rows.
"""

from __future__ import annotations

import re
from pathlib import Path

from anychip_tools import compatibility, remedies
from anychip_tools.facts import rows
from anychip_tools.report import markdown_table
from backends import BACKENDS
from backends.vendors.drivers import CANN_OF_TORCH_NPU
from backends.vendors.table import NVIDIA

PAGES = [Path(__file__).parents[1] / "docs" / f"troubleshooting{language}.md" for language in ("", ".zh-CN")]
_BEGIN = "<!-- Made of the commands' own tables by python -m benchmarks.troubleshooting; change those. -->"
_END = "<!-- Made until here. -->"


def page(path: Path = PAGES[0]) -> str:
    """Return the whole page as Markdown: its own text, with the tables made anew."""
    head, _, rest = path.read_text(encoding="utf-8").partition(_BEGIN)
    tables = "\n".join((_imports(), _versions(), _vendors(), _operators())).rstrip()
    return f"{head}{_BEGIN}\n\n{tables}\n\n{_END}{rest.partition(_END)[2]}"


def _imports() -> str:
    rows = [(f"`{sign}`", remedy) for sign, remedy in compatibility.IMPORT_REMEDIES.items()]
    return "## A package cannot be imported\n\n" + markdown_table(("the message has", "what to do"), rows)


def _versions() -> str:
    rows = [
        *((f"torch_npu {npu}", f"CANN {cann}") for npu, cann in CANN_OF_TORCH_NPU.items()),
        *(
            (f"torch for CUDA {cuda}", f"driver {driver} or newer")
            for pair in NVIDIA.machine.pairs
            if pair.software == "cuda"
            for cuda, driver in pair.versions.items()
        ),
        *(
            (f"torch_tensorrt {bridge}", f"TensorRT {engine}")
            for pair in NVIDIA.machine.pairs
            if pair.other == "tensorrt"
            for bridge, engine in pair.versions.items()
        ),
        *(
            (f"torch for DTK {dtk[:2]}.{dtk[2:]}", f"driver {driver} or newer")
            for dtk, driver in compatibility.DRIVER_OF_DTK.items()
        ),
        ("torch 2.N", "torchvision 0.(N+15)"),
        ("torch_npu, torch_musa, torch_tensorrt 2.N", "torch 2.N"),
        ("torch_mlu …+torch2.N", "torch 2.N"),
    ]
    files = "`plugins/tools/anychip_tools/compatibility.py`, and `table.py` and `drivers.py` in `backends/vendors/`"
    said = f"Sources are in {files}. The check `compatibility` of the doctor applies it.\n"
    return "## Versions that belong together\n\n" + said + "\n" + markdown_table(("this", "wants"), rows)


def _vendors() -> str:
    known = [each.facts for each in BACKENDS if each.name in rows()]  # With plug-ins' facts on our vendors.
    found = [
        (row.title or row.vendor, f"`{sign}`", re.sub(r"\s+", " ", remedy))
        for row in known
        for sign, remedy in row.remedies.items()
    ]
    libraries = [
        (row.title or row.vendor, ", ".join(f"`{name}`" for name in row.machine.libraries))
        for row in known
        if row.machine.libraries
    ]
    return (
        "## A device fails while it loads or computes\n\n"
        + markdown_table(("vendor", "the message has", "what to do"), found)
        + "\nLibraries that must load before anything else does (`anychip doctor`, the check `libraries`):\n\n"
        + markdown_table(("vendor", "libraries"), libraries)
    )


def _operators() -> str:
    steps = "\n".join(f"{number}. {text}" for number, text in enumerate(remedies.STEPS.values(), 1))
    switches = [(f"`{device}`", text) for device, text in remedies.SWITCHES.items()]
    rewrites = [(f"`{operator}`", text) for operator, text in remedies.REWRITES.items()]
    return (
        "## A device lacks an operator\n\n`anychip ops MODEL` names it. What helps, in this order:\n\n"
        f"{steps}\n\n"
        "Switches of the vendors' software:\n\n"
        + markdown_table(("device", "switch"), switches)
        + "\nOther ways to write a model:\n\n"
        + markdown_table(("operator", "write"), rewrites)
        + f"\nAn operator of your own: {remedies.CUSTOM}.\n\nAn operator refuses the type: {remedies.TYPE_REFUSED}.\n"
    )


if __name__ == "__main__":
    for path in PAGES:
        path.write_text(page(path), encoding="utf-8")
