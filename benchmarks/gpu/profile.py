"""Question: the parts of a batch's time: the replay alone, copies each way, the engine, and scattered items."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import numpy as np
import torch

from anychip_tools.benchmark.device_sweep import throughput
from app.processes.arena import Arena
from backends import Executable
from backends.engines.streamed import host_memory
from benchmarks.gpu.asked import LEAST_RUNS, Asked


def ask(asked: Asked) -> dict[str, Any]:
    """Measure milliseconds and images a second, for each network and batch size."""
    rows = []
    for model in asked.models():
        network, arena = model.network(), Arena([(int(np.prod(model.input_shape)), 2 * asked.sizes[-1])])
        executable = asked.loaded(model)
        network = getattr(executable, "_by_size", {}).get(asked.sizes[-1], network)  # As the engine made it.
        for size in asked.sizes:
            pixels = torch.zeros((size, *model.input_shape), dtype=torch.uint8, device=asked.device)
            with torch.inference_mode():
                outputs = network(pixels)
            host = host_memory(pixels.shape, torch.uint8)
            hosts = [host_memory(output.shape, output.dtype) for output in outputs]
            replay_s = asked.time_s(asked.replay(network, pixels), 4)
            in_s = asked.time_s(lambda pixels=pixels, host=host: pixels.copy_(host, non_blocking=True), 4)
            out_s = asked.time_s(
                lambda outputs=outputs, hosts=hosts: [
                    each.copy_(output, non_blocking=True) for each, output in zip(hosts, outputs, strict=True)
                ],
                4,
            )
            buffers = [executable.buffer(size) for _ in range(executable.depth)]
            rate, _ = throughput(executable, buffers, asked.seconds)
            row = {
                "network": model.name,
                "batch": size,
                "replay_ms": 1e3 * replay_s,
                "copy_in_ms": 1e3 * in_s,
                "copy_out_ms": 1e3 * out_s,
                "bytes_out": sum(each.nbytes for each in hosts),
                "replay_images_per_s": size / replay_s,
                "engine_images_per_s": rate,
                "engine_of_replay": rate * replay_s / size,
            }
            if executable.takes_rows:
                row["rows_images_per_s"] = _by_rows(executable, arena, model.input_shape, size, asked.seconds)
                row["rows_locked"] = all(executable._locked.values()) and bool(executable._locked)  # type: ignore[attr-defined]
            rows.append({name: round(each, 4) if isinstance(each, float) else each for name, each in row.items()})
        executable.close()
        arena.close()
    return {"rows": rows, "aim": "engine_of_replay >= 0.9 for resnet50 at 64"}


def _by_rows(executable: Executable, arena: Arena, shape: tuple[int, ...], size: int, seconds: float) -> float:
    """Return images a second from the slots of an arena, two batches in flight."""
    batches = [[arena.slot(0, turn * size + row).reshape(shape) for row in range(size)] for turn in (0, 1)]
    under_way: deque[Any] = deque()
    done = 0
    executable.start_rows(batches[0], size).outputs()
    executable.start_rows(batches[1], size).outputs()
    began_s = time.perf_counter()
    while time.perf_counter() - began_s < seconds or done < LEAST_RUNS:
        under_way.append(executable.start_rows(batches[(done + len(under_way)) % 2], size))
        if len(under_way) == executable.depth:
            under_way.popleft().outputs()
            done += 1
    while under_way:
        under_way.popleft().outputs()
        done += 1
    return done * size / (time.perf_counter() - began_s)
