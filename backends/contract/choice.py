"""Choice of the backend that serves, and of its devices.

Owns: the known facts after the choice (backends.registry chooses). Must not import torch: the server has none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NoReturn

from backends.contract.backend import Backend, Device, Probe
from backends.contract.errors import BackendUnavailableError
from backends.simulated import simulates
from backends.vendors.table import Facts


@dataclass(frozen=True)
class AbsentBackend(Backend):
    """Backend that this process cannot use: another process has found it, or it cannot be made."""

    name: str
    facts: Facts
    reason: str = "The device is another process's."

    def probe(self) -> Probe:
        return Probe(False, self.reason)

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise BackendUnavailableError(self.reason)

    devices = load = memory = release_cache = telemetry = _refuse


@dataclass(frozen=True)
class Choice:
    """Backend that serves, the ids of its chosen devices, and why preferred backends were not taken.

    `found`: detection's result for all devices of the backend; `left_out`: those that do not answer, by id, with the
    reason.
    """

    backend: Backend
    devices: tuple[str, ...]
    refusals: Mapping[str, str] = field(default_factory=dict)
    found: tuple[Device, ...] = field(default=(), compare=False)
    left_out: Mapping[str, str] = field(default_factory=dict, compare=False)

    def device(self, device_id: str) -> Device:
        """Return detection's result for one device. Raises KeyError."""
        return {device.id: device for device in self.found}[device_id]

    @property
    def simulated(self) -> bool:
        """Return True if the devices are simulated; doctor, answers and reports say so."""
        return simulates(self.backend.facts.device_type)

    @property
    def vendor(self) -> str:
        """Return the vendor's name for reports and metrics."""
        return f"simulated-{self.backend.facts.vendor}" if self.simulated else self.backend.facts.vendor

    def as_data(self) -> Choice:
        """Return the choice for another process, which need not have the backend."""
        return replace(self, backend=AbsentBackend(self.backend.name, self.backend.facts))
