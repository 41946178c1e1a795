"""The environment in which processes find the doubles of pyACL and atc."""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = Path(__file__).with_name("cann")


def variables(**told: str) -> dict[str, str]:
    """`told`: what the doubles read, such as ACL_DOUBLE_COUNT."""
    path = os.pathsep.join((str(FOLDER / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]))
    return {"PYTHONPATH": f"{ROOT}{os.pathsep}{FOLDER}", "PATH": path, **told}
