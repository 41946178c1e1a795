"""Accelerators that are not there: whether this process has any (docs/simulation.md).

Owns: `ANYCHIP_SIMULATE`, which processes started from here inherit, and finding the package that has them, an entry
point of the group `anychip.simulation`. Must not import it where nothing is simulated.
"""

from __future__ import annotations

import os
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from anychip_base.extras import how_to_install
from backends.contract.errors import BackendUnavailableError

VARIABLE = "ANYCHIP_SIMULATE"


def missing() -> BackendUnavailableError:
    """Says what is not installed."""
    return BackendUnavailableError(
        f"Simulated devices, and the one called null, are part of the tools: {how_to_install('tools')}."
    )


def simulates(device_type: str) -> bool:
    """Whether this torch device type is simulated here."""
    return os.environ.get(VARIABLE, "").partition(",")[0].partition(":")[0].strip() == device_type


def configure(simulate: str, null: str, cache_dir: Path) -> None:
    """Let the devices of these two settings be here and in processes started from here; "" changes nothing.

    Raises BackendUnavailableError: a text, no such package, or what that one lacks.
    """
    if null:
        package().configure_null(null)
    if simulate:
        package().configure(simulate, cache_dir)


def package() -> Any:
    """The module with `configure`, `configure_null`, `weigh` and `image_decoder`. Raises BackendUnavailableError where
    there is none.
    """
    for entry in entry_points(group="anychip.simulation"):
        return entry.load()
    raise missing()
