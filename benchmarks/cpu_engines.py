"""CPU engines side by side: images a second and latency over batch sizes, and what they cost in memory.

    python -m benchmarks.cpu_engines --models resnet50 yolov8n --sizes 1 8

Owns: docs/performance.md, "CPU engines, measured". Weights are random: speed does not depend on them. Variants run
turn and turn about, so that a disturbance hits all of them; compare within one run only.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
import psutil

from backends import EngineRefusedError, Executable
from backends.backend import Pixels
from backends.cpu import CpuBackend
from models import open_model, parse_spec

DEVICE = "cpu:0"


def main() -> None:
    """Print one table a model, then what two models cost each other."""
    parser = argparse.ArgumentParser(description="CPU engines side by side", epilog="--models resnet50 --sizes 1 8")
    parser.add_argument("--models", nargs="+", default=["resnet50", "yolov8n"])
    parser.add_argument("--sizes", nargs="+", type=int, default=[1, 2, 4, 8, 16])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--threads", type=int)
    parsed = parser.parse_args()
    backend = CpuBackend(parsed.threads)
    (device,) = backend.devices()
    print(f"{device.name}, {device.details}")
    for name in parsed.models:
        compare(backend, name, tuple(parsed.sizes), parsed.rounds)
    if len(parsed.models) > 1:
        in_turn(backend, parsed.models[:2], max(parsed.sizes), parsed.rounds)


def compare(backend: CpuBackend, name: str, sizes: tuple[int, ...], rounds: int) -> None:
    """Every engine and precision over the batch sizes."""
    executables: dict[str, Executable] = {}
    shape = open_model(parse_spec(f"{name}:random"), Path()).input_shape
    print(f"\n{name}: images a second at the median (latency of the batch in ms)")
    for engine, precision in itertools.product(backend.facts.engines, reversed(backend.facts.precisions)):
        before = resident(backend)
        try:
            executable = load(backend, name, engine, precision, sizes)
        except EngineRefusedError as error:
            print(f"  {engine} {precision}: {error}")
            continue
        executables[f"{engine} {precision}"] = executable
        print(f"  {engine} {precision} holds {(resident(backend) - before) / 2**20:.0f} MiB")
    for size in sizes:
        pixels = random_pixels(size, shape)
        times = measure({label: partial(executable.run, pixels) for label, executable in executables.items()}, rounds)
        cells = (f"{label} {size / seconds:6.1f} ({seconds * 1e3:6.1f})" for label, seconds in times.items())
        print(f"  batch {size:2}: " + "   ".join(cells), flush=True)
    for executable in executables.values():
        executable.close()


def in_turn(backend: CpuBackend, names: list[str], size: int, rounds: int) -> None:
    """Two models in one process: each alone, and both in turn."""
    before = resident(backend)
    runs: dict[str, Callable[[], object]] = {}
    for name in names:
        executable = load(backend, name, "auto", "auto", (1, size))
        shape = open_model(parse_spec(f"{name}:random"), Path()).input_shape
        runs[name] = partial(executable.run, random_pixels(size, shape))
    print(f"\nboth models hold {(resident(backend) - before) / 2**20:.0f} MiB of {resident(backend) / 2**20:.0f}")
    times = measure({**runs, "both": lambda: [run() for run in runs.values()]}, rounds)
    ratio = times["both"] / sum(times[name] for name in names)
    print(f"batches of {size} in turn take {ratio:.2f} times what they take after one of their own")


def load(backend: CpuBackend, name: str, engine: str, precision: str, sizes: tuple[int, ...]) -> Executable:
    """A model with random weights on an engine."""
    network = open_model(parse_spec(f"{name}:random"), Path()).network()
    return backend.load(network, DEVICE, engine, precision, sizes)


def measure(variants: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median seconds of each variant; the second of two calls counts, the first brings its weights into the caches."""
    seconds: dict[str, list[float]] = {label: [] for label in variants}
    for label in [*variants] * rounds:
        variants[label]()
        started_s = time.perf_counter()
        variants[label]()
        seconds[label].append(time.perf_counter() - started_s)
    return {label: median(values) for label, values in seconds.items()}


def random_pixels(size: int, shape: tuple[int, int, int]) -> Pixels:
    """A batch of noise."""
    return np.random.default_rng(0).integers(0, 256, (size, *shape), dtype=np.uint8)


def resident(backend: CpuBackend) -> int:
    """Bytes of this process in memory, after what is free was given back."""
    backend.release_cache(DEVICE)
    return int(psutil.Process().memory_info().rss)


if __name__ == "__main__":
    main()
