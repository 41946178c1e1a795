"""Question: the link of host and card; pageable, pinned, locked memory each way, both at once; gathering; topology."""

from __future__ import annotations

import mmap
import shutil
import subprocess
import time
from typing import Any
from unittest import mock

import numpy as np
import torch

from app.processes.arena import sealed_memory
from backends.engines import streamed
from backends.engines.streamed import host_memory
from benchmarks.gpu.asked import Asked, gb_per_s

_SIZES = (1_228_800, 9_633_792, 78_643_200)
"""Bytes of an image of 640 x 640, 64 of 224 x 224, 64 of 640 x 640."""


def ask(asked: Asked) -> dict[str, Any]:
    """Measure GB a second of each kind of memory and of gathering; report the topology."""
    rows = []
    for size in _SIZES[:1] if asked.dry else _SIZES:
        device = torch.zeros(size, dtype=torch.uint8, device=asked.device)
        back = torch.zeros_like(device)
        pageable, pinned = torch.zeros(size, dtype=torch.uint8), host_memory((size,), torch.uint8)
        other = host_memory((size,), torch.uint8)
        lock_s, locked = _locked(asked, size)
        copies = {
            "pageable_in": lambda device=device, host=pageable: device.copy_(host),
            "pinned_in": lambda device=device, host=pinned: device.copy_(host, non_blocking=True),
            "locked_in": lambda device=device, host=locked: device.copy_(host, non_blocking=True),
            "pinned_out": lambda device=back, host=other: host.copy_(device, non_blocking=True),
        }
        row: dict[str, Any] = {"bytes": size, "lock_ms": None if lock_s is None else round(1e3 * lock_s, 3)}
        row |= {f"{name}_gb_per_s": gb_per_s(size, asked.time_s(copy, 4)) for name, copy in copies.items()}
        if asked.kind != "cpu":
            streams = [asked.module.Stream() for _ in range(2)]

            def both(streams: Any = streams, copies: Any = copies) -> None:
                for stream, name in zip(streams, ("pinned_in", "pinned_out"), strict=True):
                    with asked.module.stream(stream):
                        copies[name]()

            row["both_ways_gb_per_s"] = gb_per_s(2 * size, asked.time_s(both, 4))
        if lock_s is not None:
            _runtime(asked).cudaHostUnregister(locked.data_ptr())
        rows.append(row)
    items = [np.zeros((1, 1_228_800), np.uint8) for _ in range(8 if asked.dry else 64)]
    out = np.zeros((len(items), 1_228_800), np.uint8)
    gathering = {}
    for name, least in (("one_thread", 1 << 60), ("threads", 0)):
        with mock.patch.object(streamed, "_BYTES_FOR_THREADS", least):
            gathering[f"{name}_gb_per_s"] = gb_per_s(out.nbytes, asked.time_s(lambda: streamed._gather(items, out)))
    return {"rows": rows, "gathering": gathering, "topology": _topology()}


def _locked(asked: Asked, size: int) -> tuple[float | None, torch.Tensor]:
    """Allocate memory like the arena's, locked by the driver if it can; return the seconds of locking, and it."""
    memory = torch.from_numpy(np.frombuffer(mmap.mmap(sealed_memory("anychip-kit", size), 0), np.uint8))
    memory.zero_()
    runtime = _runtime(asked)
    if runtime is None:
        return None, memory
    began_s = time.perf_counter()
    refused = int(runtime.cudaHostRegister(memory.data_ptr(), size, 0))
    return (None if refused else time.perf_counter() - began_s), memory


def _runtime(asked: Asked) -> Any:
    """Return CUDA's runtime, or HIP's under the same names, which locks memory; None for another device."""
    runtime: Any = torch.cuda.cudart  # Without types.
    return runtime() if asked.kind == "cuda" else None


def _topology() -> str:
    commands = [["nvidia-smi", "topo", "-m"], ["lscpu"]]
    found = [
        subprocess.run(command, capture_output=True, text=True, timeout=30, check=False).stdout
        for command in commands
        if shutil.which(command[0])
    ]
    return "\n".join(found)
