"""JavaScript in Node, for tests that need no browser."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import playwright
import pytest

STATIC = Path(__file__).parents[2] / "app" / "http" / "playground" / "static"
"""Modules of the page at `/`."""


def node() -> str | None:
    driver = Path(playwright.__file__).parent / "driver" / "node"
    return shutil.which("node") or (str(driver) if driver.exists() else None)


def evaluated(folder: Path, program: str, given: object = None) -> Any:
    """Return what a program prints as JSON. It imports the page's modules from `./`; `given` is a constant in it."""
    executable = node()
    if executable is None:
        pytest.skip("Node is not on this machine")
    shutil.copytree(STATIC, folder, dirs_exist_ok=True)
    (folder / "package.json").write_text('{"type": "module"}')
    (folder / "program.js").write_text(f"const given = {json.dumps(given)};\n{program}", encoding="utf-8")
    ended = subprocess.run(
        [executable, "program.js"], cwd=folder, capture_output=True, encoding="utf-8", timeout=120, check=False
    )
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)
