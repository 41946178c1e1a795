"""Registry of backends, other packages' included: order, choice, report. Must not know names of vendors' software."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from anychip_base.extras import entry_points
from backends import simulated
from backends.contract.backend import AbsentBackend, Backend, Choice, Device
from backends.contract.errors import BackendError, BackendUnavailableError, first_line
from backends.vendors import table as vendors
from backends.vendors.cpu import CpuBackend
from backends.vendors.cuda import CudaHooks, CudaTypeBackend
from backends.vendors.table import Facts
from backends.vendors.torch_device import TorchBackend, driver_files

GROUP = "anychip.backends"


def external_backends() -> tuple[Backend, ...]:
    """Return other packages' backends, by name; cannot raise: one that cannot be made is in the list, unavailable."""
    taken = {row.name: row.vendor for row in vendors.ACCELERATORS} | {vendors.CPU.name: ""}
    found = {(entry.name, entry.value): entry for entry in entry_points(GROUP)}
    backends: list[Backend] = []
    for _, entry in sorted(found.items()):
        try:
            made = entry.load()
            backend = made() if callable(made) else made
            if not isinstance(backend, Backend):
                raise TypeError(f"{entry.value} makes no backends.Backend")
            if taken.get(backend.name, backend.facts.vendor) != backend.facts.vendor:
                raise ValueError(f"there is another backend called {backend.name}")
        except Exception as error:  # The code of another package must not end the service.
            name = entry.name
            row = Facts(vendor=name, device_type=name, engines=(), precisions=(), name=name, title=name)
            backend = AbsentBackend(name, row, f"The backend {entry.value} cannot be used: {first_line(error)}.")
        else:
            vendors.learn(backend.facts)
            taken[backend.name] = ""
        backends.append(backend)
    return tuple(backends)


def _adapter(row: Facts) -> Backend:
    hooks = CudaHooks() if row is vendors.NVIDIA else None
    return CudaTypeBackend(row, hooks) if row.device_type == "cuda" else TorchBackend(row)


def _all() -> tuple[Backend, ...]:
    others = external_backends()
    theirs = {each.name: each for each in others if each.facts in vendors.known()}
    placed = [theirs.get(row.name) or _adapter(row) for row in vendors.ACCELERATORS]
    return (*placed, *(each for each in others if each not in placed), CpuBackend())


BACKENDS = _all()


@dataclass(frozen=True)
class Row:
    """Row of `anychip devices`: one device, or a backend that has none. `vendor`: its title for people; `here`: True if
    there is any trace of it.
    """

    device: str
    ok: bool
    detail: str
    vendor: str
    here: bool = True


def choose(device: str = "auto") -> Choice:
    """Choose the devices for `device`: `auto` or `all` (all devices of the first backend that can be used), a backend
    (`npu`: all its devices), one device (`npu:0`), or several of one backend (`cuda:0,cuda:1`).

    Raises BackendUnavailableError: with the reason for an explicit choice, with every backend's for `auto`.
    """
    if device in ("auto", "all"):
        return _first_available()
    chosen = [_named(part.strip()) for part in device.split(",")]
    backend = chosen[0].backend
    if any(choice.backend is not backend for choice in chosen):
        raise BackendUnavailableError(f"The devices of {device!r} are of several backends; one process serves one.")
    ids = tuple(dict.fromkeys(name for choice in chosen for name in choice.devices))
    return replace(chosen[0], devices=ids)


def open_backend(device: Device) -> Backend:
    """Return the backend of a device that another process has found; nothing is detected again.

    The backend then has this device and no other in this process. Raises BackendUnavailableError for a device of a
    backend that is not known here.
    """
    name = device.id.partition(":")[0]
    backend = next((each for each in BACKENDS if each.name == name), None)
    if backend is None:
        raise BackendUnavailableError(f"There is no backend for the device {device.id!r} in this process.")
    backend.take((device,))
    return backend


def _named(device: str) -> Choice:
    name, colon, index = device.partition(":")
    named = {backend.name: backend for backend in BACKENDS}
    for backend in BACKENDS:
        if name not in named and name in backend.facts.aliases:
            name = backend.name
            device = f"{name}{colon}{index}"
    if name not in named:
        near = difflib.get_close_matches(name, ["auto", "all", *named], 1)
        hint = f"; did you mean {near[0]}?" if near else "."
        if name == "null":
            raise simulated.missing()
        raise BackendUnavailableError(f"There is no device {device!r}; known are auto, {', '.join(named)}{hint}")
    found = _devices(named[name])
    ids = tuple(each.id for each in found)
    if colon:
        if device not in ids:
            if reason := named[name].probe().silent.get(device):
                raise BackendUnavailableError(f"{device} does not answer: {reason.rstrip('.')}.")
            raise BackendUnavailableError(f"There is no device {device!r}; there is {', '.join(ids)}.")
        ids = (device,)
    return Choice(named[name], ids, found=found, left_out=named[name].probe().silent)


def report() -> list[Row]:
    """Return the devices of every backend that computes: ok only if a small computation came out right."""
    rows: list[Row] = []
    for backend in [each for each in BACKENDS if each.facts.computes]:
        try:
            devices = _devices(backend)
        except BackendUnavailableError as error:
            rows.append(Row(backend.name, False, str(error), _title(backend), backend.probe().here))
            continue
        rows += (_checked(backend, device) for device in devices)
        rows += (Row(name, False, reason, _title(backend)) for name, reason in backend.probe().silent.items())
    return rows


def device_files() -> list[str]:
    """Return the device files of any vendor's driver that exist, whether or not they may be opened."""
    return sorted({path for backend in BACKENDS if isinstance(backend, TorchBackend) for path in driver_files(backend)})


def _first_available() -> Choice:
    refusals: dict[str, str] = {}
    for backend in [each for each in BACKENDS if each.facts.computes]:
        try:
            found = _devices(backend)
        except BackendUnavailableError as error:
            refusals[backend.name] = str(error)
            continue
        ids = tuple(device.id for device in found)
        return Choice(backend, ids, refusals, found, backend.probe().silent)
    reasons = " ".join(f"{name}: {reason}" for name, reason in refusals.items())
    raise BackendUnavailableError(f"No backend can be used here: {reasons}")


def _devices(backend: Backend) -> tuple[Device, ...]:
    probe = backend.probe()
    if not probe.available:
        raise BackendUnavailableError(probe.reason)
    devices = tuple(backend.devices())
    if not devices:
        raise BackendUnavailableError(f"{backend.name} has no device that this process may use.")
    return devices


class _KnownComputation(nn.Module):
    """Computation of the report: a convolution and a matrix product of small whole numbers, whose answer is known.

    The networks consist of these two operations; a card on which one of them is wrong serves nothing. Every number in
    between is exact in float16, too.
    """

    input_shape = (8, 8, 3)
    kernel: Tensor
    matrix: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kernel", torch.from_numpy(_KERNEL).float())
        self.register_buffer("matrix", torch.from_numpy(_MATRIX).float() / _SCALE)

    def cast(self, dtype: torch.dtype) -> None:
        self.to(dtype)

    def forward(self, pixels: Tensor) -> tuple[Tensor, ...]:
        features = nn.functional.conv2d(pixels.permute(0, 3, 1, 2).to(self.kernel.dtype), self.kernel)
        return (features.flatten(1) @ self.matrix,)


_KERNEL = np.arange(4 * 3 * 3 * 3).reshape(4, 3, 3, 3) % 7 - 3
_MATRIX = np.arange(4 * 6 * 6 * 5).reshape(4 * 6 * 6, 5) % 11 - 5  # No two neighbours alike, in rows and columns.
_SCALE = 1024
_TOLERANCE = 1e-3  # Of the largest number: algorithms of convolutions round in float32.


def _checked(backend: Backend, device: Device) -> Row:
    pixels = (np.arange(2 * 8 * 8 * 3) * 37 % 13).astype(np.uint8).reshape(2, 8, 8, 3)
    windows = np.lib.stride_tricks.sliding_window_view(pixels.astype(np.int64), (3, 3), axis=(1, 2))
    right = np.einsum("nhwcij,kcij->nkhw", windows, _KERNEL).reshape(len(pixels), -1) @ _MATRIX / _SCALE
    # Compiling proves no more here; where there is nothing else, it has to be.
    how = ("eager", "fp32") if "eager" in backend.facts.engines else ("auto", "auto")
    try:
        executable, _ = backend.load(_KnownComputation(), device.id, *how, (2,))
        (got,) = executable.run(pixels)
        executable.close()
    except BackendError as error:
        return Row(device.id, False, str(error), _title(backend))
    if got.shape != right.shape or not np.allclose(got, right, rtol=0, atol=_TOLERANCE * np.abs(right).max()):
        return Row(device.id, False, f"It computed {got.tolist()} where {right.tolist()} is right.", _title(backend))
    gib = device.memory_bytes / 2**30
    return Row(device.id, True, f"{device.name}, {gib:.1f} GiB, {device.auto_precision}", _title(backend))


def _title(backend: Backend) -> str:
    return backend.facts.title or backend.facts.vendor
