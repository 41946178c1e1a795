"""Doubles of pyACL and atc: in this process by the fixture `cann`, in others by their environment."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

from anychip_ascend.backend import AscendBackend

ROOT = Path(__file__).parents[2]
FOLDER = Path(__file__).with_name("cann")


def variables(**told: str) -> dict[str, str]:
    """Return the environment of the doubles. `told`: variables that they read, such as ACL_DOUBLE_COUNT."""
    path = os.pathsep.join((str(FOLDER / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]))
    return {"PYTHONPATH": f"{ROOT}{os.pathsep}{FOLDER}", "PATH": path, **told}


class Cann(NamedTuple):
    acl: Any
    backend: AscendBackend
