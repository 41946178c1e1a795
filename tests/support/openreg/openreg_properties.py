"""torch_openreg, with what anychip asks of a device's module of torch and it lacks: the properties of a device."""

from __future__ import annotations

import os
from types import SimpleNamespace

import torch_openreg  # type: ignore[import-not-found]

MEMORY_BYTES = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
"""Its memory is the host's."""


def get_device_properties(device: object) -> SimpleNamespace:
    return SimpleNamespace(name="OpenReg", total_memory=MEMORY_BYTES)


torch_openreg.openreg.get_device_properties = get_device_properties
