"""What the pages say of vendors is what their rows say: names, engines, the order of `auto`, what can be simulated."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from backends import BACKENDS
from backends.vendors import table as vendors
from tests.support.vendor_calls import engines_by_name

ROOT = Path(__file__).parents[2]
OURS = {row.name for row in (*vendors.ACCELERATORS, vendors.CPU)}
ROWS = {each.name: each.facts for each in BACKENDS if each.name in OURS}


def table_of(page: str, heading: str) -> dict[str, list[str]]:
    """Read the first table of a page that begins with a row of `--device` and `heading`: its other cells by device."""
    text = (ROOT / page).read_text(encoding="utf-8")
    [start, *_] = [each.start() for each in re.finditer(r"^\| `--device` \|.*$", text, re.M) if heading in each[0]]
    lines = text[start:].split("\n\n", 1)[0].splitlines()[2:]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    return {name: rest for first, *rest in cells for name in re.findall(r"`(\w+)`", first)}


def engines_in(cell: str) -> tuple[str, ...]:
    return tuple(name for name in re.findall(r"`(\w+)`", cell) if name in engines_by_name())


@pytest.mark.parametrize(
    ("page", "heading", "by_name", "simulated"),
    [("README.md", "engines", "; by name ", "simulated"), ("README.zh-CN.md", "引擎", "\uff1b按名称指定 ", "模拟设备")],
)
def test_the_readme_has_every_vendors_engines(page: str, heading: str, by_name: str, simulated: str) -> None:
    found = table_of(page, heading)
    assert set(found) == {*ROWS, "null"}
    for name, row in ROWS.items():
        _, engines, verified = found[name]
        preferred, _, named = re.split("[;\uff1b] ?int8", engines)[0].partition(by_name)
        assert (engines_in(preferred), engines_in(named)) == (row.engines, row.by_name), name
        assert (simulated in verified) == (row.sample is not None), name


def test_the_readme_has_the_order_of_auto() -> None:
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    [order] = re.findall(r"in this order: ([^.]*)\.", text)
    assert order.split(", ") == [row.title for row in (*vendors.ACCELERATORS, vendors.CPU)]


@pytest.mark.parametrize(("page", "yes"), [("docs/hardware.md", "yes"), ("docs/hardware.zh-CN.md", "是")])
def test_the_table_of_proofs_has_every_vendor(page: str, yes: str) -> None:
    found = table_of(page, "real" if yes == "yes" else "")
    assert set(found) == set(ROWS)
    for name, row in ROWS.items():
        assert (found[name][2] == yes) == (row.sample is not None), name


@pytest.mark.parametrize(("page", "nowhere"), [("README.md", "not on hardware"), ("README.zh-CN.md", "未经真机验证")])
def test_what_has_run_on_hardware_is_the_same_in_the_table_of_proofs_and_in_the_readme(page: str, nowhere: str) -> None:
    lines = re.findall(
        r"^\| `(\w+)`.*? \| (.*?) \|", (ROOT / "docs/hardware.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    real = {name for name, proof in lines if re.search(r"\d{4}-\d\d-\d\d", proof)}
    assert real >= {"cpu", "cuda"}
    readme = table_of(page, "`--device`")
    for name in ROWS:
        assert readme[name][2].startswith(nowhere) == (name not in real), name
    [measured] = re.findall(r"^Measured on (.*?)[;.]", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert ("H100" in measured, "x86-64" in measured) == ("cuda" in real, "cpu" in real)
