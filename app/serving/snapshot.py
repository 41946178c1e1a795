"""The service in one small JSON: what `GET /v1/stats` answers, for the playground and `anychip top`.

Owns: its shape. The numbers are those of /metrics, counted since the start: whoever wants a rate asks twice. Must not
run in the event loop: collecting takes milliseconds.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from math import isfinite

from prometheus_client import Metric
from pydantic import BaseModel

from app.observability.metrics import MEMORY_ERRORS, MEMORY_KINDS, STAGES, TELEMETRY, THROTTLED, version
from app.serving.service import Service

_STARTED_S = time.monotonic()


class Times(BaseModel):
    """How often, how long altogether; `buckets`: how many took up to so many seconds, by that number as text."""

    count: int
    seconds: float
    buckets: dict[str, int] = {}


class ModelSnapshot(BaseModel):
    """A model. `requests` by outcome, `rejected` by reason, `cancelled` and `expired` by stage: those that happened.

    `images` were answered; `images_computed` may have been in vain, or twice.
    """

    model: str
    ready: bool
    requests: dict[str, int]
    images: int
    images_computed: int
    batches: int
    padding: int
    queue_depth: int
    queue_reserved: int
    queue_limit: int
    images_in_flight: int
    rejected: dict[str, int]
    cancelled: dict[str, int]
    expired: dict[str, int]
    retried: int
    wasted: int
    request_seconds: Times
    stage_seconds: dict[str, Times]


class DeviceSnapshot(BaseModel):
    """A device; null is what it does not say. `restarts` and `handovers` by reason, `cache_releases` by rung.

    `healthy` and `throttled` (by reason) are 1 or 0; `memory_errors` by kind. Errors count from the worker's start.
    """

    device: str
    vendor: str
    up: bool
    workers: int
    images: int
    batches: int
    utilization_ratio: float | None
    power_watts: float | None
    temperature_celsius: float | None
    energy_joules: float | None
    memory_temperature_celsius: float | None
    clock_hertz: float | None
    healthy: float | None
    throttled: dict[str, float | None]
    memory_errors: dict[str, float | None]
    driver_errors: float | None
    memory_bytes: dict[str, float | None]
    worker_resident_bytes: float | None
    restarts: dict[str, int]
    handovers: dict[str, int]
    cache_releases: dict[str, int]


class DecodersSnapshot(BaseModel):
    """The processes that decode images; 0 of them where nothing is decoded. `restarts` by reason."""

    up: int
    waiting: int
    restarts: dict[str, int]


class Snapshot(BaseModel):
    """Everything. Triton's statistics of a model are another form: app.observability.triton_statistics."""

    version: str
    uptime_s: float
    ready: bool
    simulated: bool
    models: list[ModelSnapshot]
    devices: list[DeviceSnapshot]
    decoders: DecodersSnapshot


class _Samples:
    """Values of the registry by name and labels."""

    def __init__(self, families: list[Metric]) -> None:
        self._found: dict[str, list[tuple[dict[str, str], float]]] = {}
        for family in families:
            for sample in family.samples:
                self._found.setdefault(sample.name, []).append((sample.labels, sample.value))

    def by(self, label: str, name: str, **labels: str) -> dict[str, float]:
        """Sums by the value of one label, of those that have the other labels."""
        sums: dict[str, float] = {}
        for given, value in self._found.get(name, ()):
            if labels.items() <= given.items():
                sums[given.get(label, "")] = sums.get(given.get(label, ""), 0.0) + value
        return sums

    def counts(self, label: str, name: str, **labels: str) -> dict[str, int]:
        """`by` in whole numbers, without what never happened."""
        return {key: int(value) for key, value in self.by(label, name, **labels).items() if value}

    def total(self, name: str, **labels: str) -> int:
        """The sum of those that have these labels."""
        return int(sum(self.by("", name, **labels).values()))

    def known(self, name: str, **labels: str) -> float | None:
        """The sum, None where there is none or it is not a number."""
        found = list(self.by("", name, **labels).values())
        return found[0] if found and isfinite(found[0]) else None

    def times(self, name: str, *, buckets: bool = False, **labels: str) -> Times:
        """A histogram's sums."""
        return Times(
            count=self.total(f"{name}_count", **labels),
            seconds=sum(self.by("", f"{name}_sum", **labels).values()),
            buckets={le: int(value) for le, value in self.by("le", f"{name}_bucket", **labels).items()}
            if buckets
            else {},
        )


def snapshot(service: Service) -> Snapshot:
    """What is so now."""
    samples = _Samples(list(service.metrics.registry.collect()))
    workers = [worker.device for worker in service.dispatcher.workers()]
    return Snapshot(
        version=version(),
        uptime_s=round(time.monotonic() - _STARTED_S, 3),
        ready=not service.readiness.why_not(),
        simulated=service.simulated,
        models=[_model(samples, name, ready=service.dispatcher.readiness.is_ready(name)) for name in service.models],
        devices=[
            _device(samples, device, service.choice.vendor, workers.count(device)) for device in service.choice.devices
        ],
        decoders=DecodersSnapshot(
            up=samples.total("anychip_decoders_up"),
            waiting=samples.total("anychip_decode_depth"),
            restarts=samples.counts("reason", "anychip_decoder_restarts_total"),
        ),
    )


def _model(samples: _Samples, name: str, *, ready: bool) -> ModelSnapshot:
    def total(metric: str) -> int:
        return samples.total(f"anychip_{metric}", model=name)

    def counts(label: str, metric: str) -> dict[str, int]:
        return samples.counts(label, f"anychip_{metric}", model=name)

    return ModelSnapshot(
        model=name,
        ready=ready,
        requests=counts("code", "requests_total"),
        images=samples.total("anychip_stage_seconds_count", model=name, stage="postprocess"),
        images_computed=total("batch_size_sum"),
        batches=total("batch_size_count"),
        padding=total("batch_padding_total"),
        queue_depth=total("queue_depth"),
        queue_reserved=total("queue_reserved"),
        queue_limit=total("queue_limit"),
        images_in_flight=total("images_in_flight"),
        rejected=counts("reason", "rejected_total"),
        cancelled=counts("stage", "cancelled_total"),
        expired=counts("stage", "expired_total"),
        retried=total("retried_total"),
        wasted=total("wasted_total"),
        request_seconds=samples.times("anychip_request_seconds", buckets=True, model=name),
        stage_seconds={stage: samples.times("anychip_stage_seconds", model=name, stage=stage) for stage in STAGES},
    )


def _device(samples: _Samples, device: str, vendor: str, workers: int) -> DeviceSnapshot:
    def counts(label: str, metric: str) -> dict[str, int]:
        return samples.counts(label, f"anychip_{metric}", device=device)

    def known_by(label: str, values: Iterable[str], metric: str) -> dict[str, float | None]:
        return {
            value: samples.known(f"anychip_device_{metric}", **{"device": device, label: value}) for value in values
        }

    memory = {kind: samples.known("anychip_device_memory_bytes", device=device, kind=kind) for kind in MEMORY_KINDS}
    return DeviceSnapshot(
        device=device,
        vendor=vendor,
        up=workers > 0,
        workers=workers,
        images=samples.total("anychip_batch_size_sum", device=device),
        batches=samples.total("anychip_batch_size_count", device=device),
        **{name: samples.known(f"anychip_device_{name}", device=device) for name in TELEMETRY},
        energy_joules=samples.known("anychip_device_energy_joules_total", device=device),
        throttled=known_by("reason", THROTTLED, "throttled"),
        memory_errors=known_by("kind", MEMORY_ERRORS, "memory_errors_total"),
        driver_errors=samples.known("anychip_device_driver_errors_total", device=device),
        memory_bytes=memory,
        worker_resident_bytes=samples.known("anychip_worker_resident_bytes", device=device),
        restarts=counts("reason", "worker_restarts_total"),
        handovers=counts("reason", "handovers_total"),
        cache_releases=counts("rung", "cache_releases_total"),
    )
