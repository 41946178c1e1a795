"""Metrics of what a device's workers report and of the models they serve.

Owns: one device's series, the sums over its workers, and which worker serves which model. Must not decide anything.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.util import find_spec
from math import nan
from pathlib import Path
from typing import get_args

from prometheus_client import Counter

from app.fleet.process import WorkerProcess
from app.observability.metrics import MEMORY_ERRORS, MEMORY_KINDS, THROTTLED, Metrics, States
from app.worker.messages import CACHE, COLLECT, HAND_OVER, Released, Stats, Trigger

RESTARTS = ("died", "hung", "lost", "leaked", "start")
HANDOVERS = ("load", "memory", "compiled")
_RELEASES = (
    *((release, trigger) for release in (COLLECT, CACHE) for trigger in (*get_args(Trigger), "request")),
    *((HAND_OVER, trigger) for trigger in ("device", "resident")),
    (CACHE, "out_of_memory"),
)


@cache
def _operators() -> frozenset[str]:
    """Return PyTorch's operators, from its own list: a compromised worker could name any number of others."""
    torchgen = find_spec("torchgen")
    folder = Path((torchgen.origin if torchgen else None) or "").parent
    with contextlib.suppress(OSError):
        text = (folder / "packaged" / "ATen" / "native" / "native_functions.yaml").read_text(encoding="utf-8")
        found = re.findall(r"^- func: ((\w+)(?:\.\w+)?)\(", text, re.M)
        return frozenset(f"aten::{name}" for names in found for name in names)
    return frozenset()


class DeviceMetrics:
    """Metrics of one device."""

    def __init__(self, metrics: Metrics, device: str, vendor: str) -> None:
        self._metrics, self._device, self._labels = metrics, device, (device, vendor)
        self._stats: dict[str, Stats] = {}
        self._up = metrics.worker_up.labels(device)
        self._up.set(0)
        for reason in RESTARTS:
            metrics.worker_restarts.labels(device, reason)
        for reason in HANDOVERS:
            metrics.handovers.labels(device, reason)
        for release, trigger in _RELEASES:
            metrics.cache_releases.labels(device, release, trigger)
            metrics.cache_released_bytes.labels(device, release)
            metrics.cache_released_host_bytes.labels(device, release)

    def ready(self) -> None:
        """Record that a worker serves."""
        self._up.set(1)

    def report(self, worker: str, stats: Stats) -> None:
        """Record a worker's report. Device memory is the sum over its workers; used and total are the device's own."""
        before = self._stats.get(worker)
        self._stats[worker] = stats
        here = self._stats.values()
        metrics = self._metrics
        for kind in MEMORY_KINDS:
            value = getattr(stats, kind) if kind in ("used", "total") else sum(getattr(each, kind) for each in here)
            metrics.device_memory_bytes.labels(*self._labels, kind).set(value)
        metrics.worker_resident_bytes.labels(self._device).set(sum(each.resident for each in here))
        self._show(stats.telemetry)
        if worker == next(iter(self._stats)):  # One of several workers on a device is enough.
            then = before.telemetry if before else stats.telemetry
            self._count(metrics.device_energy_joules, "energy_joules", then, stats.telemetry)
            for kind, name in MEMORY_ERRORS.items():
                self._count(metrics.device_memory_errors, name, then, stats.telemetry, kind)
            self._count(metrics.device_driver_errors, "driver_errors", then, stats.telemetry)
        for operator, count in stats.fallbacks.items():
            new = count - (before.fallbacks.get(operator, 0) if before else 0)
            name = operator if operator in _operators() else "other"
            metrics.operator_fallbacks.labels(self._device, name).inc(new)

    def gone(self, worker: str, *, last: bool) -> None:
        """Record that a worker is gone. `last`: no other serves the device, so its state is unknown."""
        self._stats.pop(worker, None)
        if not last:
            return
        self._up.set(0)
        for kind in MEMORY_KINDS[:-1]:
            self._metrics.device_memory_bytes.labels(*self._labels, kind).set(float("nan"))
        self._metrics.worker_resident_bytes.labels(self._device).set(0)
        self._show({})

    def released(self, message: Released) -> None:
        """Record what the memory guard of a worker has released."""
        for release in message.returned.keys() & {COLLECT, CACHE}:
            returned = message.returned[release]
            self._metrics.cache_releases.labels(self._device, release, message.trigger).inc()
            self._metrics.cache_released_bytes.labels(self._device, release).inc(returned)
            self._metrics.cache_released_host_bytes.labels(self._device, release).inc(message.host.get(release, 0))

    def _show(self, telemetry: Mapping[str, float]) -> None:
        for name, gauge in self._metrics.telemetry.items():
            gauge.labels(*self._labels).set(telemetry.get(name, nan))
        for reason, name in THROTTLED.items():
            self._metrics.device_throttled.labels(*self._labels, reason).set(telemetry.get(name, nan))

    def _count(
        self, counter: Counter, name: str, then: Mapping[str, float], now: Mapping[str, float], *labels: str
    ) -> None:
        """Add the increase since the worker's report before; skip a value that is not in the report."""
        if name in now:
            added = now[name] - then.get(name, now[name])
            counter.labels(*self._labels, *labels).inc(max(added, 0.0))  # A counter that began again has added nothing.


class ServedStates:
    """Metrics of the models that are served: worker, engine, precision and the findings of the precision gate."""

    def __init__(self, metrics: Metrics) -> None:
        self._states = (
            States(metrics.model_info),
            States(metrics.precision_error),
            States(metrics.precision_gate),
            States(metrics.model_load_seconds),
            States(metrics.model_memory_bytes),
        )

    def show(self, workers: Iterable[WorkerProcess]) -> None:
        """Show the states of `workers`: all workers that are ready."""
        info, errors, verdicts, load_times, memory = shown = [dict[tuple[str, ...], float]() for _ in self._states]
        for worker in workers:
            for index, on in worker.loaded.items():
                model = worker.model(index)
                where = (model.name, worker.device)
                served_by = (*where, on.engine, on.precision)
                load_times[where], memory[where] = on.load_s, on.memory_bytes
                info |= {(*served_by, model.weights): 1}
                errors |= {(*where, measure): error for measure, error in on.errors.items()}
                verdicts |= {(*where, engine, precision): 0 for engine, precision in on.rejected}
                if on.errors:
                    verdicts[served_by] = 1
        for state, values in zip(self._states, shown, strict=True):
            state.show(values)
