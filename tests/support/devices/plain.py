"""A backend as it is, with nothing to turn: the CPU, the null device, a real accelerator."""

from __future__ import annotations

import os

DEVICE_TYPE = os.environ["DEVICE_TYPE"]
COUNT = None  # As many as there are.
MEMORY_BYTES = None


def kernels() -> int | None:
    """Nobody counts them."""
    return None


def set_knob(name: str, value: int) -> None:
    """There is none: tests that need one skip themselves."""
