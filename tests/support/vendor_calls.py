"""Calls of our code to a device's module (`torch.npu`, `torch.mlu` and so on), read from its sources.

It follows variables, attributes and parameters that hold `torch.get_device_module(…)`, also from one function into
another. If the module goes to a place that is not followed, that place is an escape, and a test refuses it: else a
call could hide there.

`of(row)` gives the needs of a vendor's devices. It reads backends/ and plugins/ascend, but neither other vendors' files
nor the engines that the row does not offer.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable, Iterator, Mapping
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
_SET_SWITCHES = "_set_switches"  # It sets what the row names, see `of`.
_COMPLETES = "complete"  # It adds what the module lacks, and returns it.
_LOOKS = ("getattr", "hasattr", "inspect.signature")


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


@functools.cache
def parsed(text: str) -> ast.Module:
    """Parse a source; callers must not change the tree."""
    return ast.parse(text)


def read(sources: Mapping[str, str]) -> tuple[list[Call], list[str]]:
    """Return the calls, and the escapes as `file:line what`."""
    files = {path: parsed(text) for path, text in sources.items()}
    functions: dict[str, list[ast.FunctionDef]] = {}
    within: dict[str, set[int]] = {}
    for path, tree in files.items():
        defined = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        within[path] = {id(each) for each in defined}
        for each in defined:
            functions.setdefault(each.name, []).append(each)
    given: dict[int, set[str]] = {}  # Function -> its parameters that hold the module.
    while True:
        before = sum(map(len, given.values()))
        # Other files neither ask for the module nor get it.
        chosen = [path for path, text in sources.items() if "_module" in text or within[path] & set(given)]
        readers = [_Reader(path, files[path], functions, given) for path in chosen]
        if sum(map(len, given.values())) == before:
            return [each for one in readers for each in one.calls], [each for one in readers for each in one.escapes]


class _Reader:
    """Reader of one file; it adds to `given` what the file passes on."""

    def __init__(
        self, path: str, tree: ast.Module, functions: Mapping[str, list[ast.FunctionDef]], given: dict[int, set[str]]
    ) -> None:
        self.calls: list[Call] = []
        self.escapes: list[str] = []
        self._path, self._functions, self._given = path, functions, given
        self._parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
        self._attributes = {
            ast.unparse(target)
            for target, value in _assignments(tree)
            if isinstance(target, ast.Attribute) and self._is_module(value, set())
        }
        held: dict[ast.AST, set[str]] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Name | ast.Attribute | ast.Call) and not isinstance(
                getattr(node, "ctx", None), ast.Store
            ):
                scope = self._scope(node)
                if scope not in held:
                    held[scope] = self._held(scope)
                if self._is_module(node, held[scope]):
                    self._use(node)
        asked = {call.name for call in self.calls if call.guarded}
        self.calls = [replace(call, guarded=call.guarded or call.name in asked) for call in self.calls]

    def _scope(self, node: ast.AST) -> ast.AST:
        """Return the outermost function around a node: functions within it see its variables."""
        scope = node
        while (node := self._parents.get(node)) is not None:  # type: ignore[assignment]
            if isinstance(node, ast.FunctionDef) or (isinstance(node, ast.Module) and not _is_function(scope)):
                scope = node
        return scope

    def _held(self, scope: ast.AST) -> set[str]:
        names = set(self._attributes)
        for node in ast.walk(scope):
            names |= self._given.get(id(node), set())
        while True:
            found = {ast.unparse(target) for target, value in _assignments(scope) if self._is_module(value, names)}
            if found <= names:
                return names
            names |= found

    def _is_module(self, node: ast.expr, names: set[str]) -> bool:
        if isinstance(node, ast.IfExp):
            return self._is_module(node.body, names) or self._is_module(node.orelse, names)
        if isinstance(node, ast.Call):
            return _last_name(node.func) in ("get_device_module", "_module")
        return bool(names) and isinstance(node, ast.Name | ast.Attribute) and ast.unparse(node) in names

    def _use(self, node: ast.expr) -> None:
        parent = self._parents[node]
        if isinstance(parent, ast.Attribute):
            self._named(parent)
        elif isinstance(parent, ast.Call) and ast.unparse(parent.func) in _LOOKS:
            self._looked_up(parent)
        elif isinstance(parent, ast.Call | ast.keyword):
            call = parent if isinstance(parent, ast.Call) else self._parents[parent]
            assert isinstance(call, ast.Call)
            self._passed(node, call, parent.arg if isinstance(parent, ast.keyword) else None)
        elif not isinstance(parent, ast.Assign | ast.Return | ast.IfExp | ast.Tuple):
            self._escape(node, "goes on in an unknown way")
        elif isinstance(parent, ast.Return) and not self._returns_module(parent):
            self._escape(node, "is returned by a function of another name than _module")
        elif isinstance(parent, ast.Tuple) and not isinstance(self._parents[parent], ast.Assign):
            self._escape(node, "is kept in a tuple")

    def _returns_module(self, node: ast.Return) -> bool:
        above = self._parents[node]
        while not isinstance(above, ast.FunctionDef):
            above = self._parents[above]
        return above.name == "_module"

    def _named(self, node: ast.Attribute) -> None:
        names = [node.attr]
        outer = self._parents[node]
        while isinstance(outer, ast.Attribute):
            names.append(outer.attr)
            node, outer = outer, self._parents[outer]
        if isinstance(outer, ast.Call) and outer.func is node:
            keywords = {each.arg for each in outer.keywords if each.arg}
            for each in outer.keywords:
                keywords |= set() if each.arg else self._keys(each.value)
            self.calls.append(Call(".".join(names), len(outer.args), frozenset(keywords)))
        else:
            self.calls.append(Call(".".join(names)))

    def _keys(self, node: ast.expr) -> set[str]:
        """Return the keys of a dictionary that is unpacked into a call."""
        values = [
            value for target, value in _assignments(self._scope(node)) if ast.unparse(target) == ast.unparse(node)
        ]
        keys = [key for value in (node, *values) for each in ast.walk(value) for key in getattr(each, "keys", [])]
        if not keys:
            self._escape(node, "unpacks what is not known")
        return {str(key.value) for key in keys if isinstance(key, ast.Constant)}

    def _looked_up(self, node: ast.Call) -> None:
        guarded = len(node.args) != 2 or ast.unparse(node.func) == "hasattr"
        name = node.args[1]
        if isinstance(name, ast.Constant):
            self.calls.append(Call(str(name.value), guarded=guarded))
        elif ast.unparse(name) in (_GRAPH_CLASS, _PAGE_LOCKS):
            self.calls.append(Call(ast.unparse(name), guarded=guarded))
        elif constants := self._one_of(name):
            self.calls += [Call(each, guarded=guarded) for each in constants]
        else:
            self._escape(node, "is asked for a name that is not known")

    def _one_of(self, name: ast.expr) -> list[str]:
        """Return the constants that a variable of a comprehension or a loop takes."""
        loops = [node for node in ast.walk(self._scope(name)) if isinstance(node, ast.comprehension | ast.For)]
        over = [node.iter for node in loops if ast.unparse(node.target) == ast.unparse(name)]
        values = [each for one in over for each in getattr(one, "elts", [one])]
        return [str(each.value) for each in values if isinstance(each, ast.Constant)]

    def _passed(self, node: ast.expr, call: ast.Call, keyword: str | None) -> None:
        name = ast.unparse(call.func).rpartition(".")[2]
        if name in (_SET_SWITCHES, _COMPLETES):
            return
        if name not in self._functions:
            self._escape(call, f"goes to {name}, which is not followed")
        for function in self._functions.get(name, ()):
            parameters = [each.arg for each in (*function.args.posonlyargs, *function.args.args)]
            parameters = parameters[1:] if parameters[:1] == ["self"] else parameters
            if keyword is None:
                place = call.args.index(node)
                keyword_or_name = parameters[place] if place < len(parameters) else ""
            else:
                keyword_or_name = keyword
            if keyword_or_name:
                self._given.setdefault(id(function), set()).add(keyword_or_name)

    def _escape(self, node: ast.expr, what: str) -> None:
        self.escapes.append(f"{self._path}:{node.lineno} {ast.unparse(node)} {what}")


def switches(row: Facts) -> set[str]:
    """Return the names that the row sets below `torch.backends`, dotted."""
    start = "torch.backends."
    return {name.removeprefix(start) for name in row.switches if name.startswith(start)}


def _last_name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _is_function(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef)


def _assignments(scope: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    for node in ast.walk(scope):
        for target in _targets(node):
            value = node.value  # type: ignore[attr-defined]
            if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                yield from zip(target.elts, value.elts, strict=True)
            elif value is not None:
                yield target, value


def _targets(node: ast.AST) -> Iterable[ast.expr]:
    if isinstance(node, ast.Assign):
        return node.targets
    return [node.target] if isinstance(node, ast.AnnAssign | ast.NamedExpr) else []
