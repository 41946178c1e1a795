"""Surroundings of the service as metrics: the cards of its devices, and the room left for its cache.

Owns: those series. Must not decide anything.
"""

from __future__ import annotations

import shutil
from math import nan
from pathlib import Path

from app.observability.metrics import Metrics
from backends import Choice


def show_surroundings(metrics: Metrics, choice: Choice, cache_dir: Path) -> None:
    """Show the devices that are used, as detection found them, and watch the cache's disk from now on."""
    for device in choice.found:
        if device.id in choice.devices:
            card = (device.details.get("uuid", ""), device.details.get("pci", ""))
            metrics.device_info.labels(device.id, choice.vendor, device.name, *card).set(1)
    metrics.cache_dir_free_bytes.set_function(lambda: free_bytes(cache_dir))


def free_bytes(folder: Path) -> float:
    """Return the bytes that this user may still write at `folder`, which may not exist yet; NaN if unknown."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return nan
