"""Every metric the service exports: names, help, labels and buckets, in one place.

Owns: one registry for server and workers (workers report over their pipe). Label children are made once a model and
device, so that the hot path only adds numbers. Must not decide anything.
"""

from __future__ import annotations

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.exposition import choose_encoder

# One series less a histogram; Prometheus has no use for the time a counter was made.
disable_created_metrics()  # type: ignore[no-untyped-call]

STAGES = ("decode", "queue", "infer", "postprocess")
LIFE = ("upload", "decode", "queue", "infer", "postprocess")
REJECTIONS = ("queue_full", "decode_queue_full", "buffer_full", "deadline", "not_ready")
MEMORY_KINDS = ("allocated", "reserved", "used", "total")
TELEMETRY = {
    "utilization_ratio": "Share of the time the device is busy",
    "power_watts": "Power the device draws",
    "temperature_celsius": "Temperature of the device",
}

_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.015, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
_STAGE_SECONDS = (0.0001, 0.00025, *_SECONDS)
_BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64)


class Metrics:
    """The service's metrics; one instance a service, so that tests do not share counters."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        PlatformCollector(registry=registry)
        self.requests = Counter(
            "anychip_requests_total", "Requests answered, by outcome", ["model", "code"], registry=registry
        )
        self.request_seconds = Histogram(
            "anychip_request_seconds",
            "Time from a request's first byte to its answer",
            ["model"],
            buckets=_SECONDS,
            registry=registry,
        )
        self.stage_seconds = Histogram(
            "anychip_stage_seconds",
            "Time an image spends in each stage",
            ["model", "stage"],
            buckets=_STAGE_SECONDS,
            registry=registry,
        )
        self.batch_size = Histogram(
            "anychip_batch_size", "Images in a batch", ["model", "device"], buckets=_BATCH_SIZES, registry=registry
        )
        self.batch_padding = Counter(
            "anychip_batch_padding_total",
            "Places in batches that no image filled",
            ["model", "device"],
            registry=registry,
        )
        self.queue_depth = Gauge("anychip_queue_depth", "Images waiting for a worker", ["model"], registry=registry)
        self.images_in_flight = Gauge(
            "anychip_images_in_flight", "Images accepted and not yet answered", ["model"], registry=registry
        )
        self.rejected = Counter(
            "anychip_rejected_total", "Images refused at the door", ["model", "reason"], registry=registry
        )
        self.cancelled = Counter(
            "anychip_cancelled_total",
            "Images given up before their answer, by the stage they had reached",
            ["model", "stage"],
            registry=registry,
        )
        self.expired = Counter(
            "anychip_expired_total",
            "Images accepted whose deadline passed, by the stage they had reached",
            ["model", "stage"],
            registry=registry,
        )
        self.retried = Counter(
            "anychip_retried_total", "Images computed again because their worker failed", ["model"], registry=registry
        )
        self.out_of_memory = Counter(
            "anychip_out_of_memory_total",
            "Batches cut because the device had no memory for them",
            ["model", "device"],
            registry=registry,
        )
        self.handovers = Counter(
            "anychip_handovers_total", "Workers replaced by another while they served", ["device", "reason"],
            registry=registry,
        )  # fmt: skip
        self.cache_releases = Counter(
            "anychip_cache_releases_total",
            "Rungs of the memory guard that were climbed",
            ["device", "rung", "trigger"],
            registry=registry,
        )
        self.cache_released_bytes = Counter(
            "anychip_cache_released_bytes_total",
            "Bytes that rungs of the memory guard returned",
            ["device", "rung"],
            registry=registry,
        )
        self.worker_up = Gauge("anychip_worker_up", "1 while a worker serves the device", ["device"], registry=registry)
        self.worker_restarts = Counter(
            "anychip_worker_restarts_total", "Workers started again", ["device", "reason"], registry=registry
        )
        self.device_memory = Gauge(
            "anychip_device_memory_bytes", "Memory of a device", ["device", "vendor", "kind"], registry=registry
        )
        labels = ["device", "vendor"]
        self.telemetry = {
            name: Gauge(
                f"anychip_device_{name}", f"{text}; NaN where the device does not say", labels, registry=registry
            )
            for name, text in TELEMETRY.items()
        }
        self.energy = Counter(
            "anychip_device_energy_joules_total", "Energy a device has used since its worker started", labels,
            registry=registry,
        )  # fmt: skip
        self.operator_fallbacks = Counter(
            "anychip_operator_fallbacks_total",
            "Operators that ran on the CPU because the device lacks them",
            ["device", "operator"],
            registry=registry,
        )
        self.worker_resident = Gauge(
            "anychip_worker_resident_bytes", "Host memory of a worker process", ["device"], registry=registry
        )
        self.precision_error = Gauge(
            "anychip_precision_error",
            "Largest errors against float32 that the gate has measured (docs/precision.md)",
            ["model", "device", "measure"],
            registry=registry,
        )
        self.model_info = Gauge(
            "anychip_model_info",
            "How a model is served; always 1",
            ["model", "device", "engine", "precision", "weights"],
            registry=registry,
        )

    def render(self, accept: str) -> tuple[bytes, str]:
        """The exposition that a scraper with this Accept header reads, and its content type."""
        encoder, content_type = choose_encoder(accept)
        return encoder(self.registry), content_type


class ModelMetrics:
    """The children of one model, looked up once."""

    def __init__(self, metrics: Metrics, model: str) -> None:
        self.request_seconds = metrics.request_seconds.labels(model)
        self.stage_seconds = {stage: metrics.stage_seconds.labels(model, stage) for stage in STAGES}
        self.queue_depth = metrics.queue_depth.labels(model)
        self.images_in_flight = metrics.images_in_flight.labels(model)
        self.retried = metrics.retried.labels(model)
        self.rejected = {reason: metrics.rejected.labels(model, reason) for reason in REJECTIONS}
        self.cancelled = {stage: metrics.cancelled.labels(model, stage) for stage in LIFE}
        self.expired = {stage: metrics.expired.labels(model, stage) for stage in LIFE}
        self._metrics = metrics
        self._model = model
        self._succeeded = metrics.requests.labels(model, "OK")
        self._batches: dict[str, tuple[Histogram, Counter]] = {}

    def answered(self, code: str) -> None:
        """Count a request that ended with `code`, "OK" or an error's."""
        (self._succeeded if code == "OK" else self._metrics.requests.labels(self._model, code)).inc()

    def batch(self, device: str) -> tuple[Histogram, Counter]:
        """Batch sizes and padding on a device."""
        if device not in self._batches:
            labels = (self._model, device)
            self._batches[device] = (
                self._metrics.batch_size.labels(*labels),
                self._metrics.batch_padding.labels(*labels),
            )
        return self._batches[device]
