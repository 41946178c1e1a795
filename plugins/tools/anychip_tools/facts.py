"""Rows of facts of every vendor, without an import of torch, which may be missing, or end the process.

Modules of backends/vendors/ that need nothing but the standard library are loaded by their path. A child process tells
the rows of other packages' backends in one line of JSON; what packages print goes to standard error.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import is_dataclass
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from anychip_base.extras import entry_points
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
    if not entry_points("anychip.backends"):
        return {}
    command = python_command("-m", "anychip_tools.facts")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIME_LIMIT_S, check=False)
        return from_json(done.stdout)
    except (subprocess.TimeoutExpired, ValueError):  # Where torch cannot be imported; the check of torch tells why.
        return {}


def from_json(text: str) -> dict[str, Any]:
    """Return rows as `in_json` wrote them, by name; they have the attributes of rows. Raises ValueError."""
    given = json.loads(text, object_hook=lambda each: SimpleNamespace(**each["row"]) if "row" in each else each)
    return {each.name: each for each in given}


def in_json() -> str:
    """Return the rows. A backend that cannot be made has none: the check of devices tells why."""
    from backends.registry import external_backends

    facts = [backend.facts for backend in external_backends() if backend.facts.name and backend.facts.engines]
    return json.dumps(facts, default=lambda value: {"row": vars(value)} if is_dataclass(value) else dict(value))


def main() -> None:
    """Print the rows."""
    answers = os.dup(1)
    os.dup2(2, 1)
    os.write(answers, in_json().encode() + b"\n")
    os._exit(0)  # Vendors' exit handlers may hang or abort.


if __name__ == "__main__":
    main()
