"""Sweep of a network over batch sizes, from pixels in the host's memory to answers there, by engine and precision."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from math import isnan, nan
from typing import Any

import numpy as np
import psutil

from anychip_tools.benchmark.load import percentile
from backends import Backend, Executable, LoadedNetwork
from backends.contract.backend import Pixels

_WARM_UP_S = 0.3
_LEAST_RUNS = 5


def sweep(
    backend: Backend, device: str, loaded: LoadedNetwork, items: Pixels, seconds: float
) -> Iterator[dict[str, Any]]:
    """Yield the figures of every batch size of what was loaded, and close it. `items`: uint8 [n, *input_shape].

    `images_per_s`: with as many batches in flight as the engine takes. `joules_per_image`: NaN if the device does not
    report energy. `allocated_bytes`, `reserved_bytes`: of the device, NaN where its memory is the host's;
    `resident_bytes`: of this process. Raises OutOfDeviceMemoryError, BackendError.
    """
    executable, report = loaded
    try:
        for size in executable.batch_sizes:
            measured = _measured(backend, device, executable, filled(executable, items, size), seconds)
            yield {"engine": report.engine, "precision": report.precision, "batch_size": size, **measured}
    finally:
        executable.close()


def filled(executable: Executable, items: Pixels, size: int) -> list[Pixels]:
    """Return as many buffers as the executable takes batches in flight, each with `size` of the items."""
    buffers = [executable.buffer(size) for _ in range(max(1, executable.depth))]
    for buffer in buffers:
        buffer[:] = np.resize(items, buffer.shape)
    return buffers


def _measured(
    backend: Backend, device: str, executable: Executable, buffers: Sequence[Pixels], seconds: float
) -> dict[str, float]:
    repeated_s(lambda: executable.run(buffers[0]), _WARM_UP_S, least=2)
    before = backend.telemetry(device).energy_joules
    times_s = repeated_s(lambda: executable.run(buffers[0]), seconds / 2)
    rate, images = throughput(executable, buffers, seconds / 2)
    spent = backend.telemetry(device).energy_joules - before
    memory, of_host = backend.memory(device), backend.facts.host_memory
    held_bytes = {
        "allocated": nan if of_host else memory.allocated,
        "reserved": nan if of_host else memory.reserved,
        "resident": int(psutil.Process().memory_info().rss),
    }
    return {
        **{f"p{percent}_ms": percentile(times_s, percent) * 1e3 for percent in (50, 90, 99)},
        "images_per_s": rate,
        "runs": len(times_s),
        **{f"{kind}_bytes": value for kind, value in held_bytes.items()},
        "joules_per_image": nan if isnan(spent) or spent <= 0 else spent / (images + len(buffers[0]) * len(times_s)),
        **{f"{kind}_mib": value / 2**20 for kind, value in held_bytes.items()},
    }


def throughput(executable: Executable, buffers: Sequence[Pixels], seconds: float) -> tuple[float, int]:
    """Run with as many batches in flight as the executable takes; return images a second, and their number."""
    under_way: deque[Any] = deque()
    begun = done = 0
    started_s = time.perf_counter()
    while time.perf_counter() - started_s < seconds or done < _LEAST_RUNS:
        under_way.append(executable.start(buffers[begun % len(buffers)]))
        begun += 1
        if len(under_way) >= executable.depth:
            under_way.popleft().outputs()
            done += 1
    while under_way:
        under_way.popleft().outputs()
        done += 1
    images = done * len(buffers[0])
    return images / (time.perf_counter() - started_s), images


def repeated_s(run: Callable[[], object], seconds: float, least: int = _LEAST_RUNS) -> list[float]:
    """Call `run` for so many seconds, `least` times at least; return the seconds of each call."""
    times_s: list[float] = []
    end_s = time.perf_counter() + seconds
    while (now_s := time.perf_counter()) < end_s or len(times_s) < least:
        run()
        times_s.append(time.perf_counter() - now_s)
    return times_s
