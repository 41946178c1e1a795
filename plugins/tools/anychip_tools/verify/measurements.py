"""Measurements of a device: an engine in one precision (gate, speed, memory), and decoding of images."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from anychip_tools.benchmark.device_sweep import filled, repeated_s, throughput
from anychip_tools.benchmark.load import percentile
from anychip_tools.subjects import sample_model
from anychip_tools.verify.report import AUTO, Figure, Finding
from app.precision.gate import compile_options
from app.precision.probes import calibration, decoded_by_host, probe_files, probes
from app.worker.device_decoding import DeviceDecoding
from backends import BackendError, EngineRefusedError, Executable, OutOfDeviceMemoryError, choose
from backends.contract.backend import Backend, Pixels
from models.sample import IMAGES

_MB = 2**20
_SOAK_BATCHES = 500
_CHECKED_EVERY = 10
_SOAK_SHARE = 20
_LEAK_LIMIT_MB_PER_BATCH = 0.05
"""Memory that a batch may leave on the device after a release: allocators round up, a leak adds up."""
_LISTS = (1, 8, 32)
"""Numbers of images decoded at once."""


class Case(NamedTuple):
    """Model, engine and precision to try."""

    model: str
    engine: str
    precision: str

    @property
    def name(self) -> str:
        """Name of the case in the report."""
        return f"{self.model} {AUTO}" if self.engine == AUTO else f"{self.model} {self.engine} {self.precision}"


def run_case(case: Case, device: str, sizes: Sequence[int], seconds: float, cache_dir: Path) -> Finding:
    """Load through the gate, measure, run 500 batches. A refusal is a SKIP; wrong answers and leaks are failures.

    `sizes`: of batches. `seconds`: length of one measurement.
    """
    sizes = sorted(sizes)
    model = sample_model(case.model)
    backend = choose(device).backend
    images = calibration(model, str(IMAGES)) if case.precision == "int8" else None
    items = probes(model)
    options = compile_options(model, items, images, cache_dir)
    began_s = time.perf_counter()
    try:
        executable, report = backend.load(model.network(), device, case.engine, case.precision, sizes, options=options)
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
    [smallest, *_] = filled(executable, items, sizes[0])
    figures: dict[str, Figure] = {"load_s": round(load_s, 1)}
    figures |= {f"error_{name}": float(f"{error:.2g}") for name, error in report.measures.items()}
    times_s = repeated_s(lambda: executable.run(smallest), seconds)
    figures |= {f"p{percent}_ms": round(percentile(times_s, percent) * 1e3, 2) for percent in (50, 99)}
    for size in sizes:
        rate, _ = throughput(executable, filled(executable, items, size), seconds)
        figures[f"images_per_s_{size}"] = round(rate, 1)
    soaked = _soak(backend, device, executable, smallest, _SOAK_SHARE * seconds)
    figures |= soaked
    executable.close()
    operators = ", ".join(f"{name} {how}" for name, how in report.operators.items())
    if case.engine == AUTO:
        operators = "; ".join(filter(None, (f"it is {report.engine} in {report.precision}", operators)))
    if soaked["left_mb"] > _LEAK_LIMIT_MB_PER_BATCH * soaked["soak_batches"]:
        leak = f"{soaked['soak_batches']} batches left {soaked['left_mb']} MB, which a release does not give back"
        return Finding(case.name, "FAIL", leak, figures)
    return Finding(case.name, "PASS", operators, figures)


def _soak(backend: Backend, device: str, executable: Executable, pixels: Pixels, seconds: float) -> dict[str, float]:
    """Run up to 500 batches, with a release every ten: what only the cache holds is no leak. Return the figures."""
    executable.run(pixels)
    backend.release_cache(device)
    held_bytes = [_held(backend, device)]
    batch, released_bytes, end_s = 0, 0, time.perf_counter() + seconds
    while batch < _CHECKED_EVERY or (batch < _SOAK_BATCHES and time.perf_counter() < end_s):
        executable.run(pixels)
        batch += 1
        if batch % _CHECKED_EVERY == 0:
            released_bytes += backend.release_cache(device)
            held_bytes.append(_held(backend, device))
    left_mb, released_mb = (round(each / _MB, 1) for each in (left_bytes(held_bytes), released_bytes))
    return {"soak_batches": batch, "left_mb": left_mb, "released_mb": released_mb}


def _held(backend: Backend, device: str) -> int:
    """Return the bytes held: on a card all used memory, as drivers leak past the allocator; else those of tensors."""
    memory = backend.memory(device)
    return memory.allocated if backend.facts.device_type == "cpu" else memory.used


def left_bytes(held_bytes: Sequence[int]) -> int:
    """Return the growth since the first of these levels if it went on in the second half, as a leak does; else 0."""
    first, *levels = held_bytes
    middle = levels[(len(levels) - 1) // 2] if len(levels) > 1 else first
    return max(levels[-1] - first, 0) if levels[-1] > middle else 0


def cases(backend: Backend, models: Sequence[str], by_name: Sequence[str] = ()) -> list[Case]:
    """Return `auto`, then every engine in every precision, int8 last; `by_name`: engines that nothing else takes."""
    engines = (*(name for name in backend.facts.by_name if name in by_name), *backend.facts.engines)
    precisions = sorted(backend.facts.precisions, key=lambda precision: precision == "int8")
    return [Case(model, AUTO, AUTO) for model in models] + [
        Case(model, engine, precision)
        for precision in precisions
        for engine in reversed(engines)  # The last is eager, the baseline of the others.
        for model in models
    ]


def run_decoding(backend: Backend, device: str, name: str, seconds: float) -> Finding:
    """Measure the decoding for one model; the finding also says so if the backend decodes nothing."""
    model, what = sample_model(name), f"{name} decoding"
    if not backend.facts.computes:
        return Finding(what, "PASS", "this device computes nothing, and decodes nothing")
    engine = backend.facts.engines[-1]
    try:
        executable, report = backend.load(model.network(), device, engine, "auto", (len(probe_files()),))
    except BackendError as error:
        return Finding(what, "SKIP", f"there is nothing to compare answers of: {error}")
    decoder = backend.image_decoder(device)
    if decoder is None:
        executable.close()
        return Finding(what, "PASS", "the device decodes no images: the host does")
    decoding = DeviceDecoding(decoder, model)
    figures: dict[str, Figure] = {}
    files = probe_files()
    try:
        figures |= {f"error_{name}": float(f"{error:.2g}") for name, error in decoding.tried(executable).items()}
        for count in _LISTS:
            images = [files[number % len(files)] for number in range(count)]
            decoding.decoded(images)
            taken_s = repeated_s(lambda images=images: decoding.decoded(images), seconds)  # type: ignore[misc]
            figures[f"images_per_s_{count}"] = round(count * len(taken_s) / sum(taken_s), 1)
    except BackendError as error:
        return Finding(what, "FAIL", str(error), figures)
    finally:
        executable.close()
    taken_s = repeated_s(lambda: decoded_by_host(model), seconds)
    figures["images_per_s_host"] = round(len(files) * len(taken_s) / sum(taken_s), 1)
    return Finding(what, "PASS", f"by {decoder.name}; answers of {report.engine} in {report.precision}", figures)
