"""Which backends there are, in order of preference, and which one serves.

Owns: the order and the choice. An explicit choice that fails raises with the reason; the automatic one goes down the
order and keeps every refusal.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

from backends.backend import Backend, BackendError, BackendUnavailableError
from backends.cpu import CpuBackend

BACKENDS: tuple[Backend, ...] = (CpuBackend(),)
"""In order of preference; a vendor is one row."""


@dataclass(frozen=True)
class Choice:
    """The backend that serves, its devices, and why those before it do not."""

    backend: Backend
    devices: tuple[str, ...]
    refusals: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Row:
    """A line of `anychip devices`."""

    device: str
    ok: bool
    detail: str


def choose(device: str) -> Choice:
    """The devices that `device` names: `auto`, a backend (`cpu`) or a device (`cpu:0`).

    Raises BackendUnavailableError.
    """
    if device == "auto":
        refusals: dict[str, str] = {}
        for backend in BACKENDS:
            probe = backend.probe()
            if probe.available:
                return Choice(backend, tuple(found.id for found in backend.devices()), refusals)
            refusals[backend.name] = probe.reason
        raise BackendUnavailableError("no backend can be used here: " + "; ".join(refusals.values()))
    known = {backend.name: backend for backend in BACKENDS}
    chosen = known.get(device.partition(":")[0])
    if chosen is None:
        near = difflib.get_close_matches(device, known, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise BackendUnavailableError(f"there is no device {device!r}; known are auto, {', '.join(known)}{hint}")
    probe = chosen.probe()
    if not probe.available:
        raise BackendUnavailableError(probe.reason)
    ids = tuple(found.id for found in chosen.devices())
    if ":" in device:
        if device not in ids:
            raise BackendUnavailableError(f"there is no device {device!r}; {chosen.name} has {', '.join(ids)}")
        ids = (device,)
    return Choice(chosen, ids)


def report() -> list[Row]:
    """Every backend's devices: ok only where a small computation came out right."""
    rows = []
    for backend in BACKENDS:
        probe = backend.probe()
        if not probe.available:
            rows.append(Row(backend.name, False, probe.reason))
            continue
        for device in backend.devices():
            reason = _check(backend, device.id)
            rows.append(Row(device.id, not reason, reason or f"{device.name}, {device.auto_precision}"))
    return rows


def _check(backend: Backend, device: str) -> str:
    try:
        executable = backend.load(_Sums(), device, "eager", "fp32", (2,))
        pixels = np.arange(2 * 4 * 4 * 3, dtype=np.uint8).reshape(2, 4, 4, 3)
        (sums,) = executable.run(pixels)
        executable.close()
    except BackendError as error:
        return str(error)
    right = pixels.astype(np.float32).sum(axis=(1, 2, 3))
    return "" if np.allclose(sums, right) else f"computed {sums.tolist()} where {right.tolist()} is right"


class _Sums(nn.Module):
    """The smallest network there is: the sum of a picture's bytes."""

    input_shape = (4, 4, 3)

    def cast(self, dtype: torch.dtype) -> _Sums:
        return self

    def forward(self, pixels: Tensor) -> tuple[Tensor, ...]:
        return (pixels.to(torch.float32).sum(dim=(1, 2, 3)),)
