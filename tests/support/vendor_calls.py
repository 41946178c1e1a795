"""Calls of our code to a device's module (`torch.npu`, `torch.mlu` and so on), read from its sources.

By its names: what `torch.get_device_module(…)` or a backend's `_module()` returns is called `module` or `self._module`,
also as a parameter. A place where it goes under another name is an escape, and a test refuses it: else a call could
hide there.

`of(row)` gives the needs of a vendor's devices. It reads backends/ and plugins/ascend, but neither other vendors' files
nor the engines that the row does not offer.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from backends import BACKENDS
from backends.engines import ENGINES, Engine
from backends.vendors.table import Facts
from backends.vendors.torch_device import TorchBackend

ROOT = Path(__file__).parents[2]
FOLDERS = (ROOT / "backends", ROOT / "plugins" / "ascend" / "anychip_ascend")
_NOT_CALLERS = (
    "simulated",
    "tables",
    "general.py",
)  # Stand-ins for a device's module or a part, and tables.
_GRAPH_CLASS = "self._facts.graph_class"  # The row's, see `of`.
_PAGE_LOCKS = "locks.runtime"  # The row's, too.
_NAMES = ("module", "self._module")
_MAKERS = ("get_device_module", "_module")
_LOOKS = ("getattr", "hasattr")
_COMPLETES = "complete"  # It adds what the module lacks, and returns it.


@dataclass(frozen=True)
class Call:
    """Call to a device's module. `name`: dotted, below it. `keywords`, `positional`: arguments, if it is called.

    `guarded`: the file asks first whether the module has it.
    """

    name: str
    positional: int = 0
    keywords: frozenset[str] = frozenset()
    guarded: bool = False


def of(row: Facts) -> dict[str, Call]:
    """Return by name the calls to a device's module by code for the row's devices; calls of one name are joined."""
    found: dict[str, Call] = {}
    switches = [Call(name) for name in row.switches if not name.startswith("torch.")]
    for each in (*read(sources_for(row))[0], *switches):
        locks = row.page_locks.runtime if row.page_locks else ""
        names = {_GRAPH_CLASS: row.graph_class, _PAGE_LOCKS: locks}
        call = replace(each, name=names.get(each.name, each.name))
        if call.name:
            found[call.name] = _both(found[call.name], call) if call.name in found else call
    return found


def _both(one: Call, other: Call) -> Call:
    positional = max(one.positional, other.positional)
    return Call(one.name, positional, one.keywords | other.keywords, one.guarded and other.guarded)


def sources_for(row: Facts) -> dict[str, str]:
    """Return the files of backends/ that run for the row's devices, by their path."""
    others = {file_of(type(each)) for each in BACKENDS if isinstance(each, TorchBackend) and each.facts is not row}
    others -= {file_of(kind) for each in BACKENDS if each.facts is row for kind in type(each).__mro__}
    offered = (*row.engines, *row.by_name)
    engines = {name: file_of(kind) for name, kind in engines_by_name().items()}
    left_out = others | (set(engines.values()) - {engines[name] for name in offered})
    return {path: text for path, text in all_sources().items() if path not in left_out}


def engines_by_name() -> dict[str, type[Engine]]:
    """Return our engines, and those that backends bring."""
    brought = [kind for each in BACKENDS if isinstance(each, TorchBackend) for kind in each.hooks.engines]
    return {**ENGINES, **{kind.name: kind for kind in brought}}


@functools.cache
def all_sources() -> Mapping[str, str]:
    """Return every file of the folders that may call."""
    return {
        str(path.relative_to(folder)): path.read_text(encoding="utf-8")
        for folder in FOLDERS
        for path in sorted(folder.rglob("*.py"))
        if not set(path.parts) & set(_NOT_CALLERS)
    }


def file_of(kind: type) -> str:
    """Return the file of a class, relative to its folder."""
    return kind.__module__.partition(".")[2].replace(".", "/") + ".py"


def read(sources: Mapping[str, str]) -> tuple[list[Call], list[str]]:
    """Return the calls, and the escapes as `file:line what`."""
    trees = {path: ast.parse(text) for path, text in sources.items() if "module" in text}
    taking = {_COMPLETES} | {
        each.name
        for tree in trees.values()
        for each in ast.walk(tree)
        if isinstance(each, ast.FunctionDef) and "module" in [one.arg for one in each.args.args]
    }
    calls: list[Call] = []
    escapes: list[str] = []
    for path, tree in trees.items():
        found = [use for scope in _functions(tree) for use in _uses(scope)]
        parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
        asked = {call.name for node in found for call in _calls(node, parents) if call.guarded}
        for node in found:
            of_node = _calls(node, parents)
            calls += [replace(call, guarded=call.guarded or call.name in asked) for call in of_node]
            if not of_node and not _goes_on(node, parents, taking):
                escapes.append(f"{path}:{node.lineno} {ast.unparse(parents[node])}")
    return calls, escapes


def _functions(tree: ast.Module) -> list[ast.FunctionDef]:
    """Return the outermost functions: those within them see their variables."""
    bodies = [tree.body, *(each.body for each in tree.body if isinstance(each, ast.ClassDef))]
    return [each for body in bodies for each in body if isinstance(each, ast.FunctionDef)]


def _uses(scope: ast.FunctionDef) -> list[ast.expr]:
    """Return the expressions of a function that are the device's module: calls that make it, and names that hold it."""
    nodes = [each for each in ast.walk(scope) if isinstance(each, ast.Name | ast.Attribute | ast.Call)]
    made = [each for each in nodes if isinstance(each, ast.Call) and _last_name(each.func) in _MAKERS]
    # A network's module is annotated, and never made so.
    parameter = any(each.arg == "module" and ast.unparse(each.annotation or each) == "Any" for each in scope.args.args)
    names = _NAMES if made or parameter else _NAMES[1:]
    held = [each for each in nodes if ast.unparse(each) in names and isinstance(getattr(each, "ctx", None), ast.Load)]
    return [*made, *(each for each in held if not any(each is call.func for call in made))]


def _calls(node: ast.expr, parents: Mapping[ast.AST, ast.AST]) -> list[Call]:
    """Return the calls that an expression is the beginning of."""
    names: list[str] = []
    while isinstance(outer := parents[node], ast.Attribute):
        names.append(outer.attr)
        node = outer
    if names and isinstance(outer, ast.Call) and outer.func is node:
        keywords = {key for each in outer.keywords for key in ([each.arg] if each.arg else _keys(each.value, parents))}
        return [Call(".".join(names), len(outer.args), frozenset(keywords))]
    if names:
        return [Call(".".join(names))]
    if isinstance(outer, ast.Call) and ast.unparse(outer.func) in _LOOKS:
        name, guarded = outer.args[1], len(outer.args) != 2 or ast.unparse(outer.func) == "hasattr"
        known = isinstance(name, ast.Constant) or ast.unparse(name) in (_GRAPH_CLASS, _PAGE_LOCKS)
        text = str(name.value) if isinstance(name, ast.Constant) else ast.unparse(name)
        return [Call(text, guarded=guarded)] if known else []
    return []


def _goes_on(node: ast.expr, parents: Mapping[ast.AST, ast.AST], taking: set[str]) -> bool:
    """Return True if the module keeps its name: it is assigned, given to a function that calls it so, or returned."""
    outer = parents[node]
    while isinstance(outer, ast.Tuple | ast.IfExp):
        outer = parents[outer]
    if isinstance(outer, ast.Assign):
        [target] = outer.targets
        texts = map(ast.unparse, target.elts if isinstance(target, ast.Tuple) else [target])
        return any(text in (*_NAMES, "target") for text in texts)  # `target`: what _set_switches begins with.
    if isinstance(outer, ast.AnnAssign):
        return ast.unparse(outer.target) in (*_NAMES, "target")
    return isinstance(outer, ast.Return) or (isinstance(outer, ast.Call) and _last_name(outer.func) in taking)


def _keys(node: ast.expr, parents: Mapping[ast.AST, ast.AST]) -> set[str]:
    """Return the keys of a dictionary that is unpacked into a call: those written where it is assigned."""
    scope: ast.AST = node
    while not isinstance(scope, ast.FunctionDef):
        scope = parents[scope]
    values = [each.value for each in ast.walk(scope) if isinstance(each, ast.Assign)]
    targets = [ast.unparse(each.targets[0]) for each in ast.walk(scope) if isinstance(each, ast.Assign)]
    chosen = [value for target, value in zip(targets, values, strict=True) if target == ast.unparse(node)]
    keys = [key for value in chosen for each in ast.walk(value) if isinstance(each, ast.Dict) for key in each.keys]
    return {str(key.value) for key in keys if isinstance(key, ast.Constant)}


def switches(row: Facts) -> set[str]:
    """Return the names that the row sets below `torch.backends`, dotted."""
    start = "torch.backends."
    return {name.removeprefix(start) for name in row.switches if name.startswith(start)}


def _last_name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
