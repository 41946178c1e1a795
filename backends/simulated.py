"""Simulated accelerators: whether this process has any (docs/simulation.md).

The package that has them is an entry point of the group `anychip.simulation`, imported only if something is simulated.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from anychip_base.extras import NOT_INSTALLED, entry_points
from backends.contract.errors import BackendUnavailableError

VARIABLE = "ANYCHIP_SIMULATE"


def missing() -> BackendUnavailableError:
    """Return the error for tools that are not installed."""
    return BackendUnavailableError(f"Simulated devices, and the one called null, are not found: {NOT_INSTALLED}.")


def simulates(device_type: str) -> bool:
    """Return True if this torch device type is simulated here."""
    return os.environ.get(VARIABLE, "").partition(",")[0].partition(":")[0].strip() == device_type


def configure(simulate: str, null: str, cache_dir: Path) -> None:
    """Provide the devices of these two settings here and in child processes; "" changes nothing.

    Raises BackendUnavailableError for a wrong text, a missing package, or its missing requirements.
    """
    if null:
        package().configure_null(null)
    if simulate:
        package().configure(simulate, cache_dir)


def package() -> Any:
    """Return the module with `configure`, `configure_null`, `weigh` and `image_decoder`. Raises BackendUnavailableError
    if it is not installed.
    """
    for entry in entry_points("anychip.simulation"):
        return entry.load()
    raise missing()
