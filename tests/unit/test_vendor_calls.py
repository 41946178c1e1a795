"""What our code asks of a device's module must be in what the vendor has published.

The code is read (tests/support/vendor_calls.py), not a list of what it is meant to call. Of Cambricon's, Biren's and
Moore Threads' packages the public names are known (tests/support/vendor_api), not the sources of their newer wheels.
Of torch_npu the list of calls is held here; tests/simulated/test_vendor_sources.py compares it with the wheel.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from anychip_ascend.backend import BY_TORCH_NPU
from backends.vendors import table as vendors
from backends.vendors.table import Facts
from tests.support import vendor_calls
from tests.support.vendor_calls import Call, all_sources, of, read
from tests.support.vendor_sources import TABLES

ROOT = Path(__file__).parents[2]
LISTED = [
    pytest.param(vendors.CAMBRICON, TABLES["torch_mlu"], id="mlu"),
    pytest.param(vendors.BIREN, TABLES["torch_supa"], id="supa"),
    pytest.param(vendors.MOORE_THREADS, TABLES["torch_musa"], id="musa"),
]


def lacking(calls: Iterable[Call], table: dict[str, Any]) -> set[str]:
    """Return the calls that the vendor's list lacks, unless the code asks first and the table says what then."""
    public, lacks = set(table["public"]), table.get("lacks", {})
    return {
        call.name
        for call in calls
        if call.name.partition(".")[0] not in public and not (call.guarded and lacks.get(call.name))
    }


@pytest.mark.parametrize(("row", "table"), LISTED)
def test_the_vendor_has_what_is_called(row: Facts, table: dict[str, Any]) -> None:
    found = of(row)
    assert lacking(found.values(), table) == set()
    assert set(table.get("lacks", {})) & set(table["public"]) == set()
    assert set(table.get("lacks", {})) <= set(found)


@pytest.mark.parametrize(("row", "table"), LISTED)
def test_a_name_that_goes_from_the_list_is_missed(row: Facts, table: dict[str, Any]) -> None:
    found = of(row)
    assert len(found) >= 18
    for name in set(found) - set(table.get("lacks", {})):
        shorter = {**table, "public": [each for each in table["public"] if each != name]}
        assert lacking(found.values(), shorter) == {name}


@pytest.mark.parametrize(("row", "table"), LISTED)
def test_the_vendor_has_the_switches_that_are_set(row: Facts, table: dict[str, Any]) -> None:
    assert vendor_calls.switches(row) == set(table.get("switches", {}))


def test_calls_of_torch_npu_are_those_in_its_table() -> None:
    """Both ways, with as many arguments; methods of what a call returns are not seen here."""
    table = {call["name"]: call for call in TABLES["torch_npu"]["calls"]}
    found = of(BY_TORCH_NPU)
    methods = {name for name in table if name.startswith(f"{BY_TORCH_NPU.graph_class}.")}
    assert set(found) == set(table) - methods
    for name, call in found.items():
        assert (name, call.positional, sorted(call.keywords)) == (
            name,
            table[name]["positional"],
            sorted(table[name]["keywords"]),
        )


def test_nothing_of_the_module_goes_where_it_is_not_followed() -> None:
    assert read(all_sources())[1] == []
    others = [path for folder in ("app", "models") for path in sorted((ROOT / folder).rglob("*.py"))]
    assert [path for path in others if "get_device_module" in path.read_text(encoding="utf-8")] == []
