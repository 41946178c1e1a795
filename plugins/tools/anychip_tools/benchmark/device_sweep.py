"""Sweep of a network over batch sizes on a device: latency, throughput, memory, energy, by engine and precision.

Owns: warm-up, the order of measurements, the figures. A batch is timed from pixels in the host's memory to answers
in the host's memory, so that nothing is in flight when the clock is read. Must not know how it is shown.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from math import isnan, nan
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil
import torch

from anychip_tools.benchmark.load import percentile
from app.decoder.decoder import decode_into
from app.images.header import read_header
from backends import Backend, CompileOptions, Executable
from models import PixelModel

_WARM_UP_S = 0.3
_LEAST_RUNS = 5


@dataclass(frozen=True)
class Measured:
    """Figures of one engine, precision and batch size. `images_per_s`: with as many batches in flight as the engine
    takes. `joules_per_image`: NaN if the device does not report energy. `allocated`, `reserved`: bytes of the device,
    NaN where its memory is the host's; `resident`: bytes of this process.
    """

    engine: str
    precision: str
    batch_size: int
    p50_ms: float
    p90_ms: float
    p99_ms: float
    images_per_s: float
    runs: int
    allocated_bytes: float
    reserved_bytes: float
    resident_bytes: int
    joules_per_image: float


def sweep(
    backend: Backend,
    device: str,
    build: Callable[[], Any],
    items: npt.NDArray[np.uint8],
    *,
    engine: str,
    precision: str,
    sizes: Sequence[int],
    seconds: float,
    options: CompileOptions,
    done: Callable[[], object] = lambda: None,
) -> list[Measured]:
    """Measure every batch size of one engine in one precision. `items`: the input, uint8 [n, *input_shape].

    Raises EngineRefusedError, OutOfDeviceMemoryError, BackendError.
    """
    executable, report = backend.load(build(), device, engine, precision, sizes, options=options)
    try:
        found = []
        for size in executable.batch_sizes:
            row = _measured(backend, device, executable, items, size=size, seconds=seconds)
            found.append(replace(row, engine=report.engine, precision=report.precision))
            done()
        return found
    finally:
        executable.close()


def _measured(
    backend: Backend, device: str, executable: Executable, items: npt.NDArray[np.uint8], *, size: int, seconds: float
) -> Measured:
    buffers = [executable.buffer(size) for _ in range(max(1, executable.depth))]
    for buffer in buffers:
        buffer[:] = np.resize(items, buffer.shape)
    repeated_s(lambda: executable.run(buffers[0]), _WARM_UP_S, least=2)
    before = backend.telemetry(device).energy_joules
    times_s = repeated_s(lambda: executable.run(buffers[0]), seconds / 2)
    rate, images = throughput(executable, buffers, seconds / 2)
    spent = backend.telemetry(device).energy_joules - before
    memory = backend.memory(device)
    images += size * len(times_s)
    return Measured(
        "",
        "",
        size,
        statistics.median(times_s) * 1e3,
        percentile(times_s, 90) * 1e3,
        percentile(times_s, 99) * 1e3,
        rate,
        len(times_s),
        nan if backend.facts.host_memory else memory.allocated,
        nan if backend.facts.host_memory else memory.reserved,
        int(psutil.Process().memory_info().rss),
        nan if isnan(spent) or spent <= 0 else spent / images,
    )


def throughput(executable: Executable, buffers: Sequence[npt.NDArray[np.uint8]], seconds: float) -> tuple[float, int]:
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


def decoding(model: PixelModel, image: bytes, threads: Sequence[int], seconds: float) -> list[dict[str, float]]:
    """Measure images a second from JPEG to the network's input, by threads: decoding and placing, no network."""
    header = read_header(image)
    torch.set_num_threads(1)  # Like a decoder process.
    rows = []
    for count in threads:

        def work(_: int) -> list[float]:
            target = torch.empty(model.input_shape, dtype=torch.uint8)
            decode_into(model, image, header, target)
            return repeated_s(lambda: decode_into(model, image, header, target), seconds)

        started_s = time.perf_counter()
        with ThreadPoolExecutor(count) as pool:
            times_s = [each for part in pool.map(work, range(count)) for each in part]
        elapsed_s = time.perf_counter() - started_s
        rows.append(
            {
                "threads": count,
                "images_per_s": len(times_s) / elapsed_s,
                "p50_ms": statistics.median(times_s) * 1e3,
                "p99_ms": percentile(times_s, 99) * 1e3,
            }
        )
    return rows


def repeated_s(run: Callable[[], object], seconds: float, least: int = _LEAST_RUNS) -> list[float]:
    """Call `run` for so many seconds, `least` times at least; return the seconds of each call."""
    times_s: list[float] = []
    end_s = time.perf_counter() + seconds
    while (now_s := time.perf_counter()) < end_s or len(times_s) < least:
        run()
        times_s.append(time.perf_counter() - now_s)
    return times_s
