"""Compare CPU engines: images a second and latency over batch sizes, and their memory.

    python -m benchmarks.cpu_engines --models resnet50 yolov8n --sizes 1 8
    python -m benchmarks.cpu_engines --sizes 8 --engines openvino onnxruntime eager

Owns: docs/performance.md, "CPU engines, measured". Weights are the sample ones if there are some, else random: speed
does not depend on them, but int8 needs meaningful images. Compiled files are kept (`--cache-dir`).
Variants run turn and turn about, so that a disturbance hits all of them; compare within one run only. Ratios are to
PyTorch in a plain script: eager, float32, contiguous.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
import psutil
import torch

from app.config import Settings
from app.precision.gate import compile_options
from app.precision.probes import Calibration
from backends import EngineRefusedError, Executable
from backends.contract.backend import Pixels
from backends.engines import EagerEngine, compile_first
from backends.vendors.cpu import CpuBackend
from models import Model, WeightsNotFoundError, open_model, parse_spec
from models.sample import IMAGES

DEVICE = "cpu:0"
PLAIN = "eager fp32 contiguous"


def main() -> None:
    """Print one table a model, then the cost of two models to each other."""
    facts = CpuBackend.facts
    parser = argparse.ArgumentParser(description="CPU engines side by side", epilog="--models resnet50 --sizes 1 8")
    parser.add_argument("--models", nargs="+", default=["resnet50", "yolov8n"])
    parser.add_argument("--engines", nargs="+", default=[*facts.engines, *facts.by_name])
    parser.add_argument("--sizes", nargs="+", type=int, default=[1, 2, 4, 8, 16])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--cache-dir", type=Path, default=Settings().cache_dir)
    parser.add_argument("--alone", action="store_true", help="do not measure what two models cost each other")
    parsed = parser.parse_args()
    backend, cache_dir = CpuBackend(parsed.threads), parsed.cache_dir.expanduser()
    (device,) = backend.devices()
    print(f"{device.name}, {device.details}")
    for name in parsed.models:
        compare(backend, name, parsed.engines, tuple(parsed.sizes), rounds=parsed.rounds, cache_dir=cache_dir)
    if len(parsed.models) > 1 and not parsed.alone:
        in_turn(backend, parsed.models[:2], max(parsed.sizes), parsed.rounds, cache_dir)


def compare(
    backend: CpuBackend, name: str, engines: list[str], sizes: tuple[int, ...], *, rounds: int, cache_dir: Path
) -> None:
    """Measure every engine and precision over the batch sizes."""
    executables: dict[str, Executable] = {PLAIN: plain(name, sizes)}
    shape = opened(name).input_shape
    print(f"\n{name}: times as fast as {PLAIN}, images a second at the median (latency of the batch in ms)")
    for engine, precision in itertools.product(engines, reversed(backend.facts.precisions)):
        before, started_s = resident(backend), time.perf_counter()
        try:
            executable = load(backend, name, engine, precision, sizes, cache_dir=cache_dir)
        except EngineRefusedError as error:
            print(f"  {engine} {precision}: {error}")
            continue
        executables[f"{engine} {precision}"] = executable
        ready_s = time.perf_counter() - started_s
        print(f"  {engine} {precision}: ready in {ready_s:.0f} s, holds {(resident(backend) - before) / 2**20:.0f} MiB")
    for size in sizes:
        pixels = random_pixels(size, shape)
        times = measure({label: partial(executable.run, pixels) for label, executable in executables.items()}, rounds)
        for label, seconds in times.items():
            ratio = times[PLAIN] / seconds
            print(f"  batch {size:2}: {ratio:5.2f} {label:24} {size / seconds:6.1f} ({seconds * 1e3:6.1f})", flush=True)
    for executable in executables.values():
        executable.close()


def in_turn(backend: CpuBackend, names: list[str], size: int, rounds: int, cache_dir: Path) -> None:
    """Measure two models in one process: each alone, and both in turn."""
    before = resident(backend)
    runs: dict[str, Callable[[], object]] = {}
    for name in names:
        executable = load(backend, name, "auto", "auto", (1, size), cache_dir=cache_dir)
        shape = opened(name).input_shape
        runs[name] = partial(executable.run, random_pixels(size, shape))
    print(f"\nboth models hold {(resident(backend) - before) / 2**20:.0f} MiB of {resident(backend) / 2**20:.0f}")
    times = measure({**runs, "both": lambda: [run() for run in runs.values()]}, rounds)
    ratio = times["both"] / sum(times[name] for name in names)
    print(f"batches of {size} in turn take {ratio:.2f} times what they take after one of their own")


def plain(name: str, sizes: tuple[int, ...]) -> Executable:
    """Load a network as a plain PyTorch script runs it."""
    network = opened(name).network()
    network.to(memory_format=torch.contiguous_format)
    engine = EagerEngine(replace(CpuBackend.facts, channels_last=False))
    return compile_first([engine], network, DEVICE, ("fp32",), sizes)


def opened(name: str) -> Model:
    """Open a model with the sample weights, or random ones if there are none."""
    with contextlib.suppress(WeightsNotFoundError):
        return open_model(parse_spec(f"{name}:sample"), Path())
    return open_model(parse_spec(f"{name}:random"), Path())


def load(
    backend: CpuBackend, name: str, engine: str, precision: str, sizes: tuple[int, ...], *, cache_dir: Path
) -> Executable:
    """Load a model on an engine, without the gate: only its speed matters here."""
    model = opened(name)
    calibration = Calibration(model, str(IMAGES)) if precision == "int8" and model.weights == "sample" else None
    options = compile_options(model, None, calibration, cache_dir)
    return backend.load(model.network(), DEVICE, engine, precision, sizes, options=options).executable


def measure(variants: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Return the median seconds of each variant; of two calls the second counts: the first fills the caches."""
    seconds: dict[str, list[float]] = {label: [] for label in variants}
    for label in [*variants] * rounds:
        variants[label]()
        started_s = time.perf_counter()
        variants[label]()
        seconds[label].append(time.perf_counter() - started_s)
    return {label: median(values) for label, values in seconds.items()}


def random_pixels(size: int, shape: tuple[int, int, int]) -> Pixels:
    """Draw a batch of noise."""
    return np.random.default_rng(0).integers(0, 256, (size, *shape), dtype=np.uint8)


def resident(backend: CpuBackend) -> int:
    """Return the bytes of this process in memory, after a release of free memory."""
    backend.release_cache(DEVICE)
    return int(psutil.Process().memory_info().rss)


if __name__ == "__main__":
    main()
