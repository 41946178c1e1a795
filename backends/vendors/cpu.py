"""CPU backend: always there, the reference for everything else."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Sequence
from math import isnan, nan
from typing import Any

import psutil
import torch

from backends import host
from backends.contract.backend import (
    DEFAULTS,
    Backend,
    CompileOptions,
    Device,
    LoadedNetwork,
    Memory,
    Network,
    Probe,
    Telemetry,
    wanted,
)
from backends.engines import compile_first, engines_of
from backends.vendors import table as vendors

log = logging.getLogger(__name__)

_DEVICE = "cpu:0"
# avx512_bf16 was measured: docs/performance.md, "CPU engines, measured". amx_bf16, matrix units for it, was not yet.
_BF16_FLAGS = {"amx_bf16", "avx512_bf16"}
_UNMEASURED_BF16_FLAGS = {"bf16", "svebf16"}  # ARM's: bf16 serves there by its name.


class CpuBackend(Backend):
    """Backend of all cores this process may use, as one device."""

    name = "cpu"
    facts = vendors.CPU

    def __init__(self, threads: int | None = None) -> None:
        self._threads = threads or host.core_count()
        self._energy = host.EnergyCounter()
        self._last_energy = (time.monotonic(), self._energy.joules())
        psutil.cpu_percent()  # Utilisation counts from here.

    def probe(self) -> Probe:
        return Probe(True)

    def devices(self) -> list[Device]:
        flags = host.cpu_flags()
        return [
            Device(
                id=_DEVICE,
                name=host.cpu_name(),
                memory_bytes=host.memory_bytes()[1],
                auto_precision="bf16" if flags & _BF16_FLAGS else "fp32",
                details={
                    "threads": str(self._threads),
                    "capability": torch.backends.cpu.get_cpu_capability(),
                    "bf16": ", ".join(sorted(flags & (_BF16_FLAGS | _UNMEASURED_BF16_FLAGS))) or "none",
                },
            )
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
        if precisions[0] == "bf16" and self.devices()[0].details["bf16"] == "none":
            # Measured with ResNet50 on such a CPU: seven times slower than float32.
            log.warning("this CPU has no units for bf16, which then runs several times slower than fp32")
        torch.set_num_threads(self._threads)
        engines = engines_of(self.facts, engine, network, self._threads)
        return compile_first(engines, network, _DEVICE, precisions, batch_sizes, options=options)

    def memory(self, device: str) -> Memory:
        """Return the resident set as `allocated` and `reserved`: the C library does not tell them apart."""
        resident = int(psutil.Process().memory_info().rss)
        used, total = host.memory_bytes()
        return Memory(resident, resident, used, total)

    def release_cache(self, device: str) -> int:
        process = psutil.Process()
        before = int(process.memory_info().rss)
        gc.collect()
        host.release_free_memory()
        return max(0, before - int(process.memory_info().rss))

    def telemetry(self, device: str) -> Telemetry:
        """Return the machine's utilisation and mean power since the last call; energy since the backend was made."""
        (then_s, then_joules), now_s, joules = self._last_energy, time.monotonic(), self._energy.joules()
        self._last_energy = (now_s, joules)
        elapsed_s = now_s - then_s
        sensors: dict[str, Any] = getattr(psutil, "sensors_temperatures", dict)()  # Only where psutil knows how.
        temperatures = [entry.current for name in ("coretemp", "k10temp") for entry in sensors.get(name, ())]
        return Telemetry(
            utilization_ratio=psutil.cpu_percent() / 100,
            power_watts=nan if isnan(joules) or elapsed_s <= 0 else (joules - then_joules) / elapsed_s,
            energy_joules=joules,
            temperature_celsius=max(temperatures, default=nan),
        )
