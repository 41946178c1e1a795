"""Device that computes nothing: it answers with the right shape after a chosen delay, and fails on demand.

Must not be taken for hardware, by `auto` or by the report: its answers are zeros. A batch of images that are all zero
is a warm-up and not counted; a batch that is tried again in halves is three (docs/null.md).
"""

from __future__ import annotations

import math
import mmap
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from anychip_tools.behaviour import Behaviour, FaultKind, parse_null
from backends.contract.backend import (
    DEFAULTS,
    Array,
    Backend,
    CompileOptions,
    Device,
    Executable,
    LoadedNetwork,
    Memory,
    Network,
    Pixels,
    Probe,
    Started,
    Telemetry,
    wanted,
)
from backends.contract.errors import (
    BackendError,
    BackendUnavailableError,
    EngineRefusedError,
    OutOfDeviceMemoryError,
    translated_errors,
)
from backends.engines.engine import Engine, compile_first
from backends.vendors.table import Facts, Pretence

_TEMPERATURE_CELSIUS = 50.0
_CLOCK_HERTZ = 1e9
_VARIABLE = "ANYCHIP_NULL"  # Processes started from here inherit it.


def configure(text: str) -> None:
    """Set the behaviour of devices loaded from now on, here and in children. Raises BackendUnavailableError."""
    parse_null(text)
    if text.strip():
        os.environ[_VARIABLE] = text
    else:
        os.environ.pop(_VARIABLE, None)


def _configured() -> Behaviour:
    return parse_null(os.environ.get(_VARIABLE, ""))


@dataclass
class _State:
    counted: int = 0
    leaked: list[mmap.mmap] = field(default_factory=list)
    cached: list[mmap.mmap] = field(default_factory=list)
    made_s: float = field(default_factory=time.monotonic)
    busy_s: float = 0.0
    free_s: float = 0.0  # Time at which the batches in flight will be done.
    errors: float = 0.0  # Errors of each kind.
    last_busy: tuple[float, float] = (0.0, 0.0)  # Age and busy time at the last `busy_ratio`.

    def busy_ratio(self) -> float:
        """Return the share of time that the device was busy since the last call."""
        now = (time.monotonic() - self.made_s, self.busy_s)
        (lived_s, busy_s), self.last_busy = self.last_busy, now
        return min(1.0, (now[1] - busy_s) / (now[0] - lived_s)) if now[0] > lived_s else 0.0

    @property
    def leaked_bytes(self) -> int:
        return sum(len(block) for block in self.leaked)

    @property
    def cached_bytes(self) -> int:
        return sum(len(block) for block in self.cached)


class NullBackend(Backend):
    """Backend of the devices `null:0`, `null:1`, … as many as configured."""

    name = "null"

    def __init__(self) -> None:
        self._states: dict[str, _State] = {}

    # Read-only and computed, because the behaviour is set after this module is imported; callers only ever read it.
    @property
    def facts(self) -> Facts:  # type: ignore[override]
        """Facts of the present configuration. Cannot raise: `probe` reports an invalid one."""
        text = os.environ.get(_VARIABLE, "")
        try:
            behaviour = parse_null(text)
        except BackendUnavailableError:
            behaviour = Behaviour()
        return Facts(
            vendor="null",
            device_type="null",
            engines=(_NullEngine.name,),
            precisions=_NullEngine.precisions,
            environment={_VARIABLE: text} if text else {},
            # If its package takes time to import, its workers are spawned, as vendors' are.
            pretence=Pretence(behaviour.reads_pixels, behaviour.probes_mb << 20, forks=behaviour.import_ms == 0),
        )

    def probe(self) -> Probe:
        try:
            _configured()
        except BackendUnavailableError as error:
            return Probe(False, str(error))
        return Probe(True)

    def devices(self) -> list[Device]:
        behaviour = _configured()
        return [
            Device(f"null:{index}", "computes nothing", behaviour.memory_mb << 20, "fp32")
            for index in range(behaviour.devices)
        ]

    def load(
        self,
        network: Network,
        device: str,
        engine: str,
        precision: str,
        batch_sizes: Sequence[int],
        *,
        options: CompileOptions = DEFAULTS,
    ) -> LoadedNetwork:
        precisions, options = wanted(self, device, precision, options)
        behaviour, state = _configured(), self._state(device)
        if engine not in ("auto", _NullEngine.name):
            raise EngineRefusedError(f"The null device has no engine {engine!r}; it has {_NullEngine.name}.")
        time.sleep(behaviour.load_ms / 1e3)
        return compile_first([_NullEngine(behaviour, state)], network, device, precisions, batch_sizes, options=options)

    def memory(self, device: str) -> Memory:
        """Count leaked memory as allocated, cached memory as reserved."""
        state = self._state(device)
        leaked, reserved = state.leaked_bytes, state.leaked_bytes + state.cached_bytes
        return Memory(leaked, reserved, reserved, _configured().memory_mb << 20)

    def release_cache(self, device: str) -> int:
        state = self._state(device)
        returned = state.cached_bytes
        state.cached.clear()
        return returned

    def telemetry(self, device: str) -> Telemetry:
        """Report figures if `power_w` is set; `sick` adds heat, and one more error of each kind at every call."""
        state, behaviour = self._state(device), _configured()
        if not behaviour.power_w:
            return Telemetry()
        state.errors += behaviour.sick
        return Telemetry(
            utilization_ratio=state.busy_ratio(),
            power_watts=behaviour.power_w,
            energy_joules=behaviour.power_w * (time.monotonic() - state.made_s),
            temperature_celsius=_TEMPERATURE_CELSIUS,
            memory_temperature_celsius=_TEMPERATURE_CELSIUS,
            clock_hertz=_CLOCK_HERTZ,
            healthy=float(not behaviour.sick),
            heat_throttled=float(behaviour.sick),
            power_throttled=0.0,
            corrected_memory_errors=state.errors,
            uncorrected_memory_errors=state.errors,
            driver_errors=state.errors,
        )

    def _state(self, device: str) -> _State:
        known = [each.id for each in self.devices()]
        if device not in known:
            raise BackendUnavailableError(f"There is no device {device!r}; there is {', '.join(known)}.")
        return self._states.setdefault(device, _State())


class _NullEngine(Engine):
    name = "null"
    precisions = ("fp32",)
    forms = ("pixels", "onnx", "program", "script")

    def __init__(self, behaviour: Behaviour, state: _State) -> None:
        self._behaviour = behaviour
        self._state = state

    def compile(
        self, network: Network, device: str, precision: str, batch_sizes: tuple[int, ...], options: CompileOptions
    ) -> Executable:
        with translated_errors(device):
            outputs = _outputs(network, batch_sizes[0])
        if any(output.shape[:1] != batch_sizes[:1] for output in outputs):
            raise EngineRefusedError(f"it answers {batch_sizes[0]} images with {[tuple(o.shape) for o in outputs]}")
        shapes = [tuple(output.shape[1:]) for output in outputs]
        if self._behaviour.output_mb:
            *others, last = shapes[0] or (1,)
            row_bytes = max(1, math.prod(others) * _numpy_dtype(outputs[0]).itemsize)
            shapes[0] = (*others, max(last, (self._behaviour.output_mb << 20) // row_bytes))
        answers = {
            size: tuple(
                np.zeros((size, *shape), _numpy_dtype(output)) for shape, output in zip(shapes, outputs, strict=True)
            )
            for size in batch_sizes
        }
        return _NullExecutable(device, answers, network.input_shape, self._behaviour, self._state)


def _outputs(network: Network, size: int) -> tuple[Tensor, ...]:
    """Return outputs for `size` images, for their shapes and types: a run takes less than importing "meta" does."""
    with torch.inference_mode():
        return network(torch.zeros((size, *network.input_shape), dtype=torch.uint8))


def _numpy_dtype(tensor: Tensor) -> np.dtype[Any]:
    return np.dtype(np.float32) if tensor.is_floating_point() else torch.empty(0, dtype=tensor.dtype).numpy().dtype


class _NullExecutable(Executable):
    """Executable with answers made beforehand: without delay and faults a run costs its checks, a few us."""

    def __init__(
        self,
        device: str,
        answers: dict[int, tuple[Array, ...]],
        input_shape: tuple[int, ...],
        behaviour: Behaviour,
        state: _State,
    ) -> None:
        super().__init__(device, tuple(answers), input_shape)
        self._answers = answers
        self._behaviour = behaviour
        self._state = state
        self._delay_s = {size: (behaviour.delay_ms + behaviour.image_delay_ms * size) / 1e3 for size in answers}
        self.depth = behaviour.depth

    def start(self, pixels: Pixels) -> Started:
        """Start a batch. Faults act at once, like those of a driver at submission."""
        if self.depth == 1:
            return super().start(pixels)
        self._check(pixels)
        delay_s = self._delay_s[len(pixels)]
        self._state.busy_s += delay_s
        with translated_errors(self.device):
            answers = self._answered(pixels)
        self._state.free_s = done_s = max(self._state.free_s, time.monotonic()) + delay_s

        def outputs() -> tuple[Array, ...]:
            time.sleep(max(0.0, done_s - time.monotonic()))
            return answers

        return Started(outputs)

    def _execute(self, pixels: Pixels) -> tuple[Array, ...]:
        if delay_s := self._delay_s[len(pixels)]:
            self._state.busy_s += delay_s
            time.sleep(delay_s)  # Releases the interpreter lock, as waiting for a device does.
        return self._answered(pixels)

    def _answered(self, pixels: Pixels) -> tuple[Array, ...]:
        answers = self._answers[len(pixels)]
        # The first row mostly decides, and takes no time; all rows take 30 us for eight images of 224 pixels.
        if self._behaviour.reads_pixels and (pixels[0, :1].any() or pixels.any()):
            self._state.counted += 1
            self._take(self._behaviour.leak_mb << 20, self._state.leaked)
            self._take(self._behaviour.cache_mb << 20, self._state.cached)
            for fault in self._behaviour.faults:
                rows = fault.rows(pixels, self._state.counted)
                if rows and fault.kind == "nan":
                    answers = tuple(_with_nan(answer, rows) for answer in answers)
                elif rows:
                    self._act(fault.kind)
        return answers

    def _take(self, size: int, blocks: list[mmap.mmap]) -> None:
        if not size:
            return
        if self._state.leaked_bytes + self._state.cached_bytes + size > self._behaviour.memory_mb << 20:
            lost = "leaked" if self._state.leaked else "cached"
            raise OutOfDeviceMemoryError(f"{self.device} has no memory left: it has {lost}.")
        # New pages: memory from the allocator may be resident already, and then nothing would grow.
        try:
            block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise OutOfDeviceMemoryError(f"{self.device} cannot take {size} bytes: {error}.") from error
        np.frombuffer(block, dtype=np.uint8)[:: mmap.PAGESIZE] = 1  # A page takes memory once it is written to.
        blocks.append(block)

    def _act(self, kind: FaultKind) -> None:
        """Raise an error, end or stop the process (SIGCONT continues it), or never return."""
        if kind == "fail":
            raise BackendError(f"{self.device} was told to fail.")
        if kind == "oom":
            raise OutOfDeviceMemoryError(f"{self.device} was told to run out of memory.")
        if kind == "hang":
            threading.Event().wait()  # The interpreter lives on, as in a driver call that never returns.
        # A crash ends the process at once, like a driver's abort. A frozen process does not even show that it lives.
        os.kill(os.getpid(), signal.SIGSTOP if kind == "freeze" else signal.SIGKILL)

    def _release(self) -> None:
        self._answers = {}


def _with_nan(answer: Array, rows: list[int]) -> Array:
    if answer.dtype.kind != "f":  # A class number cannot be NaN.
        return answer
    answer = answer.copy()
    answer[rows] = np.nan
    return answer


def _import() -> None:
    if multiprocessing.current_process().name != "MainProcess":
        try:
            import_ms = _configured().import_ms
        except BackendUnavailableError:  # `probe` reports it later.
            return
        time.sleep(import_ms / 1e3)


_import()
