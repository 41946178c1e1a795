"""The CPU: x86 or ARM, always there.

Owns: what the host says of its cores, memory and load. Engines do the computing.
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Sequence
from pathlib import Path

import psutil
import torch

from backends.backend import (
    Backend,
    BackendUnavailableError,
    Device,
    EngineRefusedError,
    Executable,
    Facts,
    Memory,
    Network,
    Probe,
    Telemetry,
)
from backends.engines import EagerEngine, Engine, OpenVINOEngine

_ENGINES: dict[str, Engine] = {engine.name: engine for engine in (OpenVINOEngine(), EagerEngine())}
_CGROUP_QUOTA = Path("/sys/fs/cgroup/cpu.max")
_CGROUP_MEMORY = Path("/sys/fs/cgroup/memory.max")


class CpuBackend(Backend):
    """The host's processor as one device, `cpu:0`."""

    name = "cpu"
    facts = Facts(
        vendor="cpu",
        device_type="cpu",
        engines=tuple(_ENGINES),
        precisions=("bf16", "fp32"),
        # Shapes are fixed here, so few primitives are ever needed; unbounded caches are known to grow (pytorch#98688).
        environment={"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "1024", "LRU_CACHE_CAPACITY": "1024"},
    )

    def probe(self) -> Probe:
        """Always available."""
        return Probe(True)

    def devices(self) -> list[Device]:
        """One device: all the cores this process may use."""
        precision = "bf16" if _has_bf16_units() else "fp32"
        details = {"threads": str(_threads()), "capability": torch.backends.cpu.get_cpu_capability()}
        return [Device("cpu:0", _cpu_name(), _memory_bytes(), precision, details)]

    def load(
        self, network: Network, device: str, engine: str, precision: str, batch_sizes: Sequence[int]
    ) -> Executable:
        """See Backend."""
        if device not in ("cpu", "cpu:0"):
            raise BackendUnavailableError(f"there is no device {device!r}; the CPU is cpu:0")
        if precision == "auto":
            precision = self.devices()[0].auto_precision
        names = self.facts.engines if engine == "auto" else (engine,)
        refusals = []
        for name in names:
            if name not in _ENGINES:
                raise EngineRefusedError(f"there is no engine {name!r} on the CPU; there is {', '.join(_ENGINES)}")
            try:
                return _ENGINES[name].compile(network, precision, batch_sizes, _threads())
            except EngineRefusedError as error:
                refusals.append(str(error))
        raise EngineRefusedError("; ".join(refusals))

    def memory(self, device: str) -> Memory:
        """The process's resident memory counts as allocated; there is no caching allocator to tell apart."""
        resident, total = int(psutil.Process().memory_info().rss), _memory_bytes()
        return Memory(resident, resident, total - psutil.virtual_memory().available, total)

    def release_cache(self, device: str) -> int:
        """Ask the C library to give free memory back to the system."""
        process = psutil.Process()
        before = int(process.memory_info().rss)
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
        return max(0, before - int(process.memory_info().rss))

    def telemetry(self, device: str) -> Telemetry:
        """Utilisation since the last call; the rest is unknown here."""
        return Telemetry(utilization_ratio=psutil.cpu_percent() / 100)


def _threads() -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = _CGROUP_QUOTA.read_text().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))


def _memory_bytes() -> int:
    total = int(psutil.virtual_memory().total)
    try:
        return min(total, int(_CGROUP_MEMORY.read_text()))
    except (OSError, ValueError):
        return total


def _has_bf16_units() -> bool:
    try:
        flags = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    return "amx_bf16" in flags or "avx512_bf16" in flags


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
