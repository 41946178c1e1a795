"""Engine in one precision on the device: the gate, then its speed over batch sizes, then its memory.

Owns: the batch sweep and the memory of 500 batches. Must not serve: the service part does.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from anychip_tools.benchmark.device_sweep import repeated_s, throughput
from anychip_tools.benchmark.load import percentile
from anychip_tools.subjects import sample_model
from anychip_tools.verify.report import AUTO, Figure, Finding
from app.precision.gate import compile_options
from app.precision.probes import calibration, probes
from backends import EngineRefusedError, Executable, OutOfDeviceMemoryError, choose
from backends.contract.backend import Backend, Pixels

MB = 2**20
SOAK_BATCHES = 500
_CHECKED_EVERY = 10
_SOAK_SHARE = 20
LEAK_LIMIT_MB_PER_BATCH = 0.05
"""Memory that a batch may leave on the device after a release: allocators round up, a leak adds up."""


@dataclass(frozen=True)
class Sweep:
    """Settings that all cases share. `sizes`: of batches. `seconds`: length of one measurement."""

    device: str
    models: tuple[str, ...]
    sizes: tuple[int, ...]
    seconds: float
    cache_dir: Path


@dataclass(frozen=True)
class Case:
    """Model, engine and precision to try."""

    model: str
    engine: str
    precision: str
    sweep: Sweep

    @property
    def name(self) -> str:
        """Name of the case in the report."""
        return f"{self.model} {AUTO}" if self.engine == AUTO else f"{self.model} {self.engine} {self.precision}"


def run_case(case: Case) -> Finding:
    """Load through the gate, measure, run 500 batches. A refusal is a SKIP; wrong answers and leaks are failures."""
    sweep, sizes = case.sweep, tuple(sorted(case.sweep.sizes))
    model = sample_model(case.model)
    choice = choose(sweep.device)
    images = calibration(model, "") if case.precision == "int8" else None
    items = probes(model)
    options = compile_options(model, items, images, sweep.cache_dir)
    began_s = time.perf_counter()
    try:
        executable, report = choice.backend.load(
            model.network(), sweep.device, case.engine, case.precision, sizes, options=options
        )
    except (EngineRefusedError, OutOfDeviceMemoryError) as error:
        wrong = "its answers" in str(error)
        return Finding(case.name, "FAIL" if wrong else "SKIP", str(error))
    load_s = time.perf_counter() - began_s
    if case.engine != AUTO and report.precision != case.precision:
        executable.close()
        why = "; ".join(f"{name}: {reason}" for name, reason in report.refusals.items())
        # The gate has found its answers wrong; or the engine does not offer this precision.
        wrong = any(engine == case.engine and precision == case.precision for engine, precision in report.rejected)
        return Finding(case.name, "FAIL" if wrong else "SKIP", why or f"it became {report.precision}")
    pixels = np.resize(items, (sizes[-1], *model.input_shape))
    figures: dict[str, Figure] = {"load_s": round(load_s, 1)}
    figures |= {f"error_{name}": float(f"{error:.2g}") for name, error in report.measures.items()}
    times_s = repeated_s(lambda: executable.run(pixels[: sizes[0]]), sweep.seconds)
    figures |= {f"p{percent}_ms": round(percentile(times_s, percent) * 1e3, 2) for percent in (50, 99)}
    for size in sizes:
        buffers = [executable.buffer(size) for _ in range(executable.depth)]
        for buffer in buffers:
            buffer[:] = pixels[:size]
        figures[f"images_per_s_{size}"] = round(throughput(executable, buffers, sweep.seconds)[0], 1)
    soaked = soak(choice.backend, sweep.device, executable, pixels[: sizes[0]], _SOAK_SHARE * sweep.seconds)
    figures |= {"soak_batches": soaked.batches, "left_mb": soaked.left_mb, "released_mb": soaked.released_mb}
    executable.close()
    operators = ", ".join(f"{name} {how}" for name, how in report.operators.items())
    if case.engine == AUTO:
        operators = "; ".join(filter(None, (f"it is {report.engine} in {report.precision}", operators)))
    if soaked.left_mb > LEAK_LIMIT_MB_PER_BATCH * soaked.batches:
        leak = f"{soaked.batches} batches left {soaked.left_mb} MB, which a release does not give back"
        return Finding(case.name, "FAIL", leak, figures)
    return Finding(case.name, "PASS", operators, figures)


@dataclass(frozen=True)
class Soaked:
    """Memory that batches left behind, and that releases returned in all."""

    batches: int
    left_mb: float
    released_mb: float


def soak(backend: Backend, device: str, executable: Executable, pixels: Pixels, seconds: float) -> Soaked:
    """Run 500 batches, or as many as fit into the time; release memory every ten batches.

    Memory that only the cache holds is no leak: it is released before it is compared.
    """
    executable.run(pixels)
    backend.release_cache(device)
    start_bytes = _held(backend, device)
    released_bytes, levels = 0, Levels()
    batch, end_s = 0, time.perf_counter() + seconds
    while batch < _CHECKED_EVERY or (batch < SOAK_BATCHES and time.perf_counter() < end_s):
        executable.run(pixels)
        batch += 1
        if batch % _CHECKED_EVERY == 0:
            released_bytes += backend.release_cache(device)
            levels.add(_held(backend, device))
    return Soaked(batch, round(levels.left(start_bytes) / MB, 1), round(released_bytes / MB, 1))


def _held(backend: Backend, device: str) -> int:
    """Return the bytes held: on a card all used memory, as drivers leak past the allocator; else those of tensors."""
    memory = backend.memory(device)
    return memory.allocated if backend.facts.device_type == "cpu" else memory.used


class Levels:
    """Bytes held over time. Memory that the first batches keep is no leak: a leak still grows at the end."""

    def __init__(self) -> None:
        self._bytes: list[int] = []

    def add(self, allocated_bytes: int) -> None:
        """Add a level, after some batches and a release."""
        self._bytes.append(allocated_bytes)

    def left(self, start_bytes: int) -> int:
        """Return the growth since the start if it went on in the second half; else 0."""
        middle_bytes = self._bytes[(len(self._bytes) - 1) // 2] if len(self._bytes) > 1 else start_bytes
        end_bytes = self._bytes[-1]
        return max(end_bytes - start_bytes, 0) if end_bytes > middle_bytes else 0


def cases(backend: Backend, sweep: Sweep, by_name: Sequence[str] = ()) -> list[Case]:
    """Return `auto`, then every engine in every precision: plain precisions before int8, which takes minutes.

    `by_name`: engines to try that the backend takes only by their name.
    """
    engines = (*(name for name in backend.facts.by_name if name in by_name), *backend.facts.engines)
    precisions = sorted(backend.facts.precisions, key=lambda precision: precision == "int8")
    return [Case(model, AUTO, AUTO, sweep) for model in sweep.models] + [
        Case(model, engine, precision, sweep)
        for precision in precisions
        for engine in reversed(engines)  # The last is eager, the baseline of the others.
        for model in sweep.models
    ]
