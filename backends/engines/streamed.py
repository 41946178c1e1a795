"""Executables on devices that copy while they compute.

    copy stream      copy n+1 ────────┐ event
    compute stream   network n ─► outputs n ─► network n+1 ─► outputs n+1 ─► event, for which the host waits

Items that lie apart are copied from their places, if the driver has locked that memory (`page_locks` of the vendor's
row); otherwise several threads bring them together in pinned memory first. The copies are right on an H100, and on
simulated and stubbed devices; only a device shows how much they overlap (docs/hardware.md).
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from backends.contract import errors
from backends.contract.backend import Array, Executable, Pixels, Started
from backends.engines.engine import Call
from backends.vendors import table as vendors

log = logging.getLogger(__name__)

_BYTES_FOR_THREADS = 4 << 20
_COPIERS = ThreadPoolExecutor(4, "copy")


class StreamedExecutable(Executable):
    """Network on the current device of its type, for each batch size; at most two batches are in flight."""

    depth = 2
    takes_rows = True

    def __init__(self, device: str, input_shape: tuple[int, ...], by_size: Mapping[int, Call]) -> None:
        super().__init__(device, tuple(sorted(by_size)), input_shape)
        self._by_size = by_size
        self._module = torch.get_device_module(torch.device(device).type)
        self._copies = self._module.Stream()
        self._pinned: list[Tensor] = []  # Memory that `buffer` gave out.
        # The device's memory for images, taken once. Memory from batch to batch would need record_stream between the
        # streams, and that makes the first empty_cache after a fault end the process (torch 2.13 and 2.14: the
        # allocator's queue of events is left with one that has been moved from).
        self._inputs: list[Tensor] = []
        self._locked: dict[int, bool] = {}  # By the address of an item's memory.
        self._staging: list[Pixels] = []

    def buffer(self, rows: int) -> Pixels:
        """Return pinned memory, if the device has such: only from there it copies while it computes."""
        tensor = host_memory((rows, *self._input_shape), torch.uint8).zero_()
        if tensor.is_pinned():
            self._pinned.append(tensor)
        pixels: Pixels = tensor.numpy()
        return pixels

    def start(self, pixels: Pixels) -> Started:
        self._check(pixels)
        return self._begin([pixels], len(pixels))

    def start_rows(self, rows: Sequence[Pixels | Tensor], size: int) -> Started:
        on_host = [row[None] for row in rows if isinstance(row, np.ndarray)]
        for row in on_host:
            self._check(row, size)
        if all(map(self._is_locked, on_host)):
            return self._begin([row[None] for row in rows], size)
        if not self._staging:
            self._staging = [self.buffer(self.batch_sizes[-1]) for _ in range(self.depth)]
        self._staging.append(self._staging.pop(0))  # As with `_inputs`.
        _gather(on_host, self._staging[-1])
        if len(on_host) == len(rows):
            return self._begin([self._staging[-1][: len(rows)]], size)
        gathered = iter(self._staging[-1][: len(on_host), None])
        return self._begin([next(gathered) if isinstance(row, np.ndarray) else row[None] for row in rows], size)

    def _execute(self, pixels: Pixels) -> tuple[Array, ...]:
        return self._begin([pixels], len(pixels)).outputs()

    def _begin(self, parts: Sequence[Pixels | Tensor], size: int) -> Started:
        """Begin a batch of `size` with the items of these parts, each [n, *input_shape], and zeros."""
        hosts: list[Tensor] = []  # The memory that its outputs come to.
        with self._translated(hosts), torch.inference_mode():
            compute = self._module.current_stream()
            if len(self._inputs) < self.depth:
                shape = (self.batch_sizes[-1], *self._input_shape)
                self._inputs.append(torch.empty(shape, dtype=torch.uint8, device=self.device))
                self._copies.wait_stream(compute)
            # Reuse the input of the batch before the last, which is done: at most two are in flight.
            self._inputs.append(self._inputs.pop(0))
            on_device = self._inputs[-1][:size]
            if any(isinstance(part, Tensor) for part in parts):
                self._copies.wait_stream(compute)
            with self._module.stream(self._copies):
                row = 0
                for part in parts:
                    given = part if isinstance(part, Tensor) else torch.from_numpy(part)
                    fast = isinstance(part, Tensor) or self._is_pinned(part)
                    on_device[row : row + len(part)].copy_(given, non_blocking=fast)
                    row += len(part)
                if row < size:
                    on_device[row:].zero_()
                copied = self._copies.record_event()
            compute.wait_event(copied)
            self._compute(on_device, hosts)
            done = _event(self._module)
            done.record(compute)

        def waited_for() -> tuple[Array, ...]:
            with self._translated(hosts):
                # torch_npu launches from a thread of its own. Where that fails, an event that it should have recorded
                # is waited for without end (seen with 2.13 over a stub driver): the server's limit for a batch ends it.
                done.synchronize()
            return tuple(host.numpy() for host in hosts)

        return Started(waited_for)

    def _compute(self, on_device: Tensor, hosts: list[Tensor]) -> None:
        copy_out(self._by_size[len(on_device)](on_device), hosts)

    def _is_locked(self, item: Pixels) -> bool:
        """Return True if the device copies from an item's memory while it computes; tried once for each.

        Locking makes the system's memory resident: items lie on pages of their own, and few of them are used often.
        """
        address = item.ctypes.data
        if address not in self._locked:
            # One that refuses memory refuses the next one, too.
            locked = all(self._locked.values()) and self._lock(address, item.nbytes)
            if locked and not torch.from_numpy(item).is_pinned():  # PyTorch does not know it: it would wait for copies.
                self._lock(address, item.nbytes, lock=False)
                locked = False
            self._locked[address] = locked
        return self._locked[address]

    def _lock(self, address: int, size_bytes: int, *, lock: bool = True) -> bool:
        """Lock the host's memory by the vendor's function, or unlock it; return False without one, or if it refuses."""
        rows = vendors.of_type(torch.device(self.device).type)
        locks = next((row.page_locks for row in rows if row.page_locks), None)
        if locks is None:
            return False
        given = (address, size_bytes, locks.flags) if lock else (address,)
        try:
            runtime = getattr(self._module, locks.runtime)()
            refused = int(getattr(runtime, locks.lock if lock else locks.unlock)(*given))
        except (AttributeError, RuntimeError):  # An older package lacks the function, or its driver does.
            return False
        if refused:
            self._forget_refusal()
        return not refused

    def _forget_refusal(self) -> None:
        """Clear the error that the runtime's refusal has left behind: it is no fault of the next batch.

        The runtime keeps it as the thread's last error, and PyTorch's binding does not clear it
        (torch/csrc/cuda/shared/cudart.cpp). The next kernel reports it: so one is launched for it.
        """
        try:
            torch.empty(1, device=self.device).fill_(0)
        except RuntimeError as error:
            log.debug("%s refuses to lock memory: %s", self.device, errors.first_line(error))

    def _is_pinned(self, pixels: Pixels) -> bool:
        address = pixels.ctypes.data
        return self._locked.get(address, False) or any(
            each.data_ptr() <= address < each.data_ptr() + each.nbytes for each in self._pinned
        )

    @contextmanager
    def _translated(self, hosts: list[Tensor]) -> Iterator[None]:
        """Translate errors; what a lost device's copies used is never freed. `hosts`: memory of the batch's outputs."""
        try:
            with errors.translated_errors(self.device, self._silence):
                yield
        except errors.DeviceLostError:
            # Kept past the interpreter's end: freeing pinned memory records an event, which fails on a lost device, and
            # torch_npu then fails in a destructor, which ends the process: seen with 2.13 over a stub driver.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object([hosts, self._pinned]))
            raise

    def _silence(self) -> str:
        """Return the device's answer to the smallest computation, "" if it is right."""
        try:
            # First without allocating: after a fault the vendors' allocators may end the process (see above).
            with errors.translated_errors(self.device):
                self._module.synchronize(self.device)
                two = (torch.ones(1).to(self.device) + 1).cpu().item()
        except errors.BackendError as error:  # A device that is full, or lacks an operator, is not lost.
            sound = isinstance(error, errors.OutOfDeviceMemoryError) or isinstance(error.__cause__, NotImplementedError)
            return "" if sound else f"nothing else computes there either: {errors.first_line(error)}"
        return "" if two == 2 else f"1 + 1 is {two} there"

    def _release(self) -> None:
        self._by_size = {}
        self._pinned, self._inputs, self._staging = [], [], []
        for address in [each for each, locked in self._locked.items() if locked]:
            self._lock(address, 0, lock=False)
        self._locked = {}


def _gather(items: Sequence[Pixels], out: Pixels) -> None:
    """Copy items [1, …] to the rows of `out`, large batches by several threads: one thread does about 8 GB a second."""
    if sum(item.nbytes for item in items) < _BYTES_FOR_THREADS:
        for row, item in enumerate(items):
            out[row] = item[0]
    else:  # NumPy holds no lock while it copies.
        list(_COPIERS.map(np.copyto, out[: len(items), None], items))


def _event(module: Any) -> Any:
    """Return an event that lets the waiting thread sleep: by default CUDA's spins, on a core that decoding wants.

    It is of the vendor's own class: torch.Event ignores `blocking` on CUDA (vllm#47081).
    """
    try:
        return module.Event(blocking=True)
    except TypeError:  # A vendor's class without that choice.
        return module.Event()


def copy_out(outputs: Sequence[Tensor], hosts: list[Tensor]) -> None:
    """Begin to copy outputs to host memory that is added to `hosts`."""
    # PyTorch keeps pinned memory for the next batch, and knows when its copies are over.
    hosts += [host_memory(output.shape, output.dtype) for output in outputs]
    for host, output in zip(hosts, outputs, strict=True):
        host.copy_(output, non_blocking=host.is_pinned())


def host_memory(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return host memory, pinned if the device has such."""
    try:
        return torch.empty(shape, dtype=dtype, pin_memory=True)
    except RuntimeError as error:
        log.debug("no pinned memory, copies will not overlap: %s", errors.first_line(error))
        return torch.empty(shape, dtype=dtype)
