"""The device that a command computes on.

Owns: what of the settings a command needs for it. Must not run anything on a device.
"""

from __future__ import annotations

from app.config import Settings, split
from app.worker.load import load_plugins
from backends import Choice, choose, simulated


def open_device(settings: Settings) -> tuple[Choice, str]:
    """The devices that the settings mean, and the first of them. Raises BackendError."""
    simulated.configure(settings.simulate, settings.null, settings.cache_dir.expanduser())
    load_plugins(split(settings.plugins))
    choice = choose(settings.device)
    return choice, choice.devices[0]
