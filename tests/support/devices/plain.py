"""Backend as it is, without knobs: the CPU, the null device, a real accelerator."""

from __future__ import annotations

import os

DEVICE_TYPE = os.environ["DEVICE_TYPE"]
COUNT = None  # As many as there are.
MEMORY_BYTES = None


def kernels() -> int | None:
    """Return None: nobody counts them."""
    return None


def set_knob(name: str, value: int) -> None:
    """Do nothing: there is no knob, and tests that need one skip themselves."""
