"""Modules of backends/vendors/ that need nothing but the standard library, loaded by path.

Owns: loading them. Must not import anything else: importing the package would import torch, which may be missing.
Rows of other packages' backends: outside_rows.py.
"""

from __future__ import annotations

import importlib.util
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any


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
