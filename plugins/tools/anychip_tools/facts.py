"""Modules of backends/vendors/ that need nothing but the standard library, loaded by path; rows of other packages.

Owns: loading them. Must not import anything else: importing the package would import torch, which may be missing. A
child process does so where other packages have backends (outside_rows.py).
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from anychip_base.interpreter import python_command

_TIME_LIMIT_S = 120.0  # For `import torch`, from a slow disk.


@cache
def facts_module(name: str) -> ModuleType:
    """Load a module of backends/vendors/ without the package around it."""
    package = importlib.util.find_spec("backends")  # Imports nothing.
    assert package is not None
    assert package.origin is not None
    file = Path(package.origin).parent / "vendors" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"anychip_{name}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # Dataclasses ask for it.
    spec.loader.exec_module(module)
    return module


def rows() -> dict[str, Any]:
    """Return the row of facts of every vendor of this repository, by the name that `--device` takes."""
    module = facts_module("table")
    return {row.name: row for row in (*module.ACCELERATORS, module.CPU) if row.name}


def every_row() -> dict[str, Any]:
    """Return every vendor's row here: `rows`, and those of other packages, in place of ours of the same name."""
    return {**rows(), **_outside_rows()}


@cache
def _outside_rows() -> dict[str, Any]:
    if not entry_points(group="anychip.backends"):
        return {}
    command = python_command("-m", "anychip_tools.outside_rows")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIME_LIMIT_S, check=False)
        return from_json(done.stdout)
    except (subprocess.TimeoutExpired, ValueError):  # Where torch cannot be imported; the check of torch tells why.
        return {}


def from_json(text: str) -> dict[str, Any]:
    """Return rows as they were before `outside_rows` wrote them, by name. Raises ValueError."""
    table = facts_module("table")
    parts = {"health": table.Question, "users": table.Question, "container": table.Container, "sample": table.Sample}

    def value(name: str, told: Any) -> Any:
        if isinstance(told, list):
            return tuple(value("", each) for each in told)
        if name in parts and told is not None:
            return parts[name](**{key: value("", each) for key, each in told.items()})
        return told

    rows = [table.Facts(**{name: value(name, told) for name, told in row.items()}) for row in json.loads(text)]
    return {row.name: row for row in rows}
