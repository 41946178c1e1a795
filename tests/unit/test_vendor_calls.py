"""What our code asks of a device's module must be in what the vendor has published.

The code is read, not a list of what it is meant to call: in functions that make the module (`get_device_module`,
`_module`) or take it as `module: Any`. Of Cambricon's, Biren's and Moore Threads' packages the public names are known
(tests/support/vendor_api), not the sources of their newer wheels. Of torch_npu the list of calls is held here;
tests/simulated/test_vendor_sources.py compares it with the wheel.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from anychip_ascend.backend import BY_TORCH_NPU
from backends import BACKENDS
from backends.vendors import table as vendors
from backends.vendors.table import Facts
from backends.vendors.torch_device import TorchBackend
from benchmarks.torchair_networks import FILE
from deploy.install import CANN_PAIRS
from tests.support.rows import engines_by_name
from tests.support.vendor_sources import TABLES

ROOT = Path(__file__).parents[2]
FOLDERS = (ROOT / "backends", ROOT / "plugins" / "ascend" / "anychip_ascend")
LISTED = [
    pytest.param(vendors.CAMBRICON, TABLES["torch_mlu"], id="mlu"),
    pytest.param(vendors.BIREN, TABLES["torch_supa"], id="supa"),
    pytest.param(vendors.MOORE_THREADS, TABLES["torch_musa"], id="musa"),
]
MAKERS = {"get_device_module", "_module"}
Uses = dict[str, tuple[int, set[str]]]
"""Most positional arguments, and all keywords, of each name below the module."""


def file_of(kind: type) -> str:
    return kind.__module__.partition(".")[2].replace(".", "/") + ".py"


def files_for(row: Facts) -> list[Path]:
    """Find the files that run for a row's devices: no other vendor's, and no engine's that the row does not offer."""
    left_out = {file_of(type(each)) for each in BACKENDS if isinstance(each, TorchBackend) and each.facts is not row}
    left_out -= {file_of(kind) for each in BACKENDS if each.facts is row for kind in type(each).__mro__}
    offered = (*row.engines, *row.by_name)
    left_out |= {file_of(kind) for name, kind in engines_by_name().items() if name not in offered}
    found = [(folder, path) for folder in FOLDERS for path in sorted(folder.rglob("*.py"))]
    return [path for folder, path in found if str(path.relative_to(folder)) not in left_out]


def functions(tree: ast.Module) -> Iterator[ast.FunctionDef]:
    """Find the outermost functions, but the one that adds to a module what it lacks."""
    for body in (tree.body, *(each.body for each in tree.body if isinstance(each, ast.ClassDef))):
        yield from (each for each in body if isinstance(each, ast.FunctionDef) and each.name != "complete")


def uses_in(scope: ast.FunctionDef, names: dict[str, str]) -> Iterator[tuple[str, int, set[str]]]:
    nodes = list(ast.walk(scope))
    made = {ast.unparse(each) for each in nodes if isinstance(each, ast.Call) and last_name(each.func) in MAKERS}
    taken = any(each.arg == "module" and ast.unparse(each.annotation or each) == "Any" for each in scope.args.args)
    held = {*made, "self._module", *(("module",) if made or taken else ())}
    parents = {child: node for node in nodes for child in ast.iter_child_nodes(node)}
    for node in nodes:
        if not isinstance(node, ast.expr) or ast.unparse(node) not in held:
            continue
        inner, outer, chain = node, parents.get(node), list[str]()
        while isinstance(outer, ast.Attribute):
            chain.append(outer.attr)
            inner, outer = outer, parents[outer]
        if chain and chain[0] not in MAKERS:
            called = outer if isinstance(outer, ast.Call) and outer.func is inner else None
            keywords = {each.arg for each in called.keywords if each.arg} if called else set()
            yield ".".join(chain), len(called.args) if called else 0, keywords
        elif isinstance(outer, ast.Call) and ast.unparse(outer.func) in ("getattr", "hasattr"):
            name = outer.args[1]
            yield str(name.value) if isinstance(name, ast.Constant) else names[ast.unparse(name)], 0, set()


def last_name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def uses(row: Facts) -> Uses:
    locks = row.page_locks.runtime if row.page_locks else ""
    names = {"self._facts.graph_class": row.graph_class, "locks.runtime": locks, "name": "", "holder": ""}
    found: Uses = {name: (0, set()) for name in row.switches if not name.startswith("torch.")}
    for path in files_for(row):
        for scope in functions(ast.parse(path.read_text(encoding="utf-8"))):
            for name, positional, keywords in uses_in(scope, names):
                before, known = found.get(name, (0, set()))
                found[name] = max(before, positional), known | keywords
    return {name: use for name, use in found.items() if name}


@pytest.mark.parametrize(("row", "table"), LISTED)
def test_the_vendor_has_what_is_called_and_the_switches_that_are_set(row: Facts, table: dict[str, Any]) -> None:
    found, lacks = set(uses(row)), set(table.get("lacks", {}))
    assert len(found) >= 18
    assert {name for name in found if name.partition(".")[0] not in table["public"]} == lacks
    of_torch = "torch.backends."
    switches = {name.removeprefix(of_torch) for name in row.switches if name.startswith(of_torch)}
    assert switches == set(table.get("switches", {}))


def test_calls_of_torch_npu_are_those_in_its_table() -> None:
    """Both ways, with as many arguments; methods of what a call returns are not seen here."""
    table = {call["name"]: call for call in TABLES["torch_npu"]["calls"]}
    found = uses(BY_TORCH_NPU)
    methods = {name for name in table if name.startswith(f"{BY_TORCH_NPU.graph_class}.")}
    assert set(found) == set(table) - methods
    for name, (positional, keywords) in found.items():
        assert positional == table[name]["positional"], name
        assert keywords <= set(table[name]["keywords"]), name
    others = [path for folder in ("app", "models") for path in sorted((ROOT / folder).rglob("*.py"))]
    assert [path for path in others if "get_device_module" in path.read_text(encoding="utf-8")] == []


# --- What was read of every torch_npu wheel that set-up may choose


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    read: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return read


def test_every_wheel_that_set_up_chooses_was_read(document: dict[str, Any]) -> None:
    assert {plugin for _, plugin in CANN_PAIRS.values()} <= set(document["wheels"])


def test_every_wheel_has_what_we_call(document: dict[str, Any]) -> None:
    """`host_empty_cache` came after 2.9.0, `npurt` after 2.10.0: backends asks before it calls."""
    later = [f"torch_npu.npu.{name}: it is not there" for name in ("host_empty_cache", "npurt")]
    lacking = {version: each["lacks_calls"] for version, each in document["wheels"].items() if each["lacks_calls"]}
    assert lacking == {**dict.fromkeys(("2.5.1", "2.6.0", "2.7.1", "2.9.0"), later), "2.10.0": later[1:]}
