"""Reader of vendors' packages without an import: the place where a name is defined, and the fit of our calls to it.

The tables are vendor_api/*.json: for a package on the registry the adapter's calls and their reasons, for others the
public names. The registry's newest wheels are downloaded into the user's cache once, and read as zip files.
"""

from __future__ import annotations

import ast
import functools
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "anychip", "vendor-wheels")
TABLES: dict[str, dict[str, Any]] = {
    path.stem: json.loads(path.read_text(encoding="utf-8"))
    for path in sorted((Path(__file__).parent / "vendor_api").glob("*.json"))
}
CALLS = [(name, call) for name, table in TABLES.items() for call in table.get("calls", ())]
Definition = ast.FunctionDef | ast.ClassDef


class Sources:
    """Modules of a package by dotted name, as text; finds the definition of a name without running anything."""

    def __init__(self, texts: Mapping[str, str]) -> None:
        self._texts = texts
        self._trees: dict[str, ast.Module] = {}

    def texts(self) -> Iterator[tuple[str, str]]:
        yield from self._texts.items()

    def tree(self, module: str) -> ast.Module | None:
        text = self._texts.get(f"{module.replace('.', '/')}.py") or self._texts.get(
            f"{module.replace('.', '/')}/__init__.py"
        )
        if text is not None and module not in self._trees:
            self._trees[module] = ast.parse(text)
        return self._trees.get(module)

    def find(self, module: str, path: str, depth: int = 8) -> Definition | None:
        """Find the definition that `module.path` leads to, through imports, aliases and instances made of a class."""
        tree = self.tree(module)
        if tree is None or not depth:
            return None
        name, _, rest = path.partition(".")
        found: Definition | None = None
        for node in statements(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
                found = node
            elif isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in node.targets):
                value = node.value.func if isinstance(node.value, ast.Call) else node.value
                found = self.find(module, ast.unparse(value), depth - 1) or found
            elif isinstance(node, ast.ImportFrom):
                origin = self._origin(module, node)
                for alias in node.names:
                    if alias.name == "*" and not name.startswith("_"):
                        found = self.find(origin, name, depth - 1) or found
                    elif (alias.asname or alias.name) == name:
                        submodule = f"{origin}.{alias.name}"
                        if rest and self.tree(submodule):
                            return self.find(submodule, rest, depth - 1)
                        found = self.find(origin, alias.name, depth - 1) or found
        if found is None and rest and self.tree(f"{module}.{name}"):
            return self.find(f"{module}.{name}", rest, depth - 1)
        if rest and isinstance(found, ast.ClassDef):
            return found if has_member(found, rest) else None
        return found

    def _origin(self, module: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        package = module.split(".")
        if f"{module.replace('.', '/')}/__init__.py" not in self._texts:
            package = package[:-1]
        package = package[: len(package) - node.level + 1]
        return ".".join([*package, *([node.module] if node.module else [])])


def statements(tree: ast.Module) -> Iterator[ast.stmt]:
    waiting: list[ast.stmt] = list(tree.body)
    while waiting:
        node = waiting.pop(0)
        yield node
        if isinstance(node, ast.If | ast.Try):
            waiting[:0] = [*node.body, *node.orelse]


def has_member(node: ast.ClassDef, name: str) -> bool:
    """Return True if a class defines `name`, or its __setattr__ compares with it, as in torch_npu's configuration."""
    for child in ast.walk(node):
        if isinstance(child, ast.FunctionDef) and child.name == name:
            return True
        if isinstance(child, ast.Compare) and any(getattr(side, "value", None) == name for side in child.comparators):
            return True
    return False


def misfit(node: Definition, positional: int, keywords: list[str]) -> str:
    """Return why a call with that many positional arguments and those keywords does not fit; "" if it does.

    A parameter must name each keyword: `**kwargs`, which would take it, proves nothing.
    """
    if isinstance(node, ast.ClassDef):
        makers = [
            child for child in node.body if isinstance(child, ast.FunctionDef) and child.name in ("__new__", "__init__")
        ]
        if not makers:
            return ""
        reasons = [_misfit(maker.args, positional + 1, keywords) for maker in makers]
        return "" if "" in reasons else reasons[0]
    return _misfit(node.args, positional, keywords)


def _misfit(arguments: ast.arguments, positional: int, keywords: list[str]) -> str:
    named = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
    if positional > len(named) and arguments.vararg is None:
        return f"takes {len(named)} positional arguments, we give {positional}"
    unknown = set(keywords) - {*named[positional:], *(argument.arg for argument in arguments.kwonlyargs)}
    if unknown:
        return f"has no parameter {', '.join(sorted(unknown))}"
    required = set(named[positional : len(named) - len(arguments.defaults)])
    required |= {
        a.arg for a, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if default is None
    }
    missing = required - set(keywords)
    return f"needs {', '.join(sorted(missing))}" if missing else ""


@functools.cache
def wheel(package: str, version: str = "") -> Path | str:
    """Return the wheel of a version, by default the registry's newest, in the cache directory; or why there is none."""
    CACHE.mkdir(parents=True, exist_ok=True)
    platforms = [f"--platform=manylinux_2_{minor}_x86_64" for minor in range(17, 40)]
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--python-version=3.11"]
    options = [*platforms, "--timeout=15", "--retries=0", "--disable-pip-version-check", f"--dest={CACHE}"]
    options += [f"{package}=={version}" if version else package]
    try:
        done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=240, check=False)
        reason = (done.stderr.strip().splitlines() or [""])[-1] if done.returncode else ""
    except (OSError, subprocess.TimeoutExpired) as error:
        reason = str(error)
    named = CACHE.glob(f"{package.replace('-', '_')}-{version or '*'}-*.whl")
    left_out = set() if version else {each for table in TABLES.values() for each in table.get("older", ())}
    found = [path for path in named if path.name.split("-")[1] not in left_out]
    found.sort(key=lambda path: path.stat().st_mtime)
    whole = [path for path in found if zipfile.is_zipfile(path)]
    return whole[-1] if whole else f"no wheel of {package}: {reason}"


def unpacked(package: str, folder: Path) -> dict[str, str]:
    """Unpack the newest wheel, and return an environment in which Python finds it first. Skip the test without one."""
    found = wheel(package)
    if isinstance(found, str):
        pytest.skip(found)
    with zipfile.ZipFile(found) as archive:
        archive.extractall(folder)
    return {"PYTHONPATH": f"{ROOT}:{folder}", "PATH": "/usr/bin:/bin", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}


@functools.cache
def sources(name: str, version: str = "") -> Sources:
    """Return the sources of a table's package in a version, by default the newest. Skip the test without its wheel."""
    path = wheel(TABLES[name]["package"], version)
    if isinstance(path, str):
        pytest.skip(path)
    with zipfile.ZipFile(path) as archive:
        inside = TABLES[name].get("inside", "")  # The folder of the wheel that goes on the path.
        texts = {
            entry.removeprefix(inside): archive.read(entry).decode("utf-8", "replace")
            for entry in archive.namelist()
            if entry.endswith(".py") and entry.startswith(f"{inside}{name}/")
        }
    return Sources(texts)
