"""Simulated device under test for device_contract.py, with the same names as the stubs."""

from __future__ import annotations

import os
from pathlib import Path

from backends import simulated

DEVICE_TYPE = os.environ["DEVICE_TYPE"]
COUNT = 2
MEMORY_BYTES: int | None = 16 * 2**30
simulated.configure(f"{DEVICE_TYPE}:{COUNT}", "", Path("~/.cache/anychip").expanduser())

from anychip_tools.simulated import device  # noqa: E402 - It exists only now.

device.install(DEVICE_TYPE)


def kernels() -> int:
    return device.count("kernels")


def set_knob(name: str, value: int) -> None:
    """Set a knob, like tests.support.stubs.plugin; `fail` is the vendor's own fault."""
    if name == "memory":
        device.set_capacity(value)
    elif name == "copy_us":
        device.set_copy_delay(value / 1000)
    elif value:
        device.fail_after(0, for_good=True)
    else:
        device.fail_after(-1)
