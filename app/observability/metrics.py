"""Every metric the service exports: names, help, labels and buckets, in one place.

Owns: one registry for server and workers (workers report over their pipe: see device_metrics). Label children are made
once a model and device, so that the hot path only adds numbers; those that can be known beforehand are there from the
start, at 0: Prometheus sees no increase in a counter that begins with 1. Must not decide anything.
"""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Mapping, Sequence
from typing import Any, cast, get_args

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    GCCollector,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.exposition import choose_encoder

from app.errors import Code
from app.observability.histogram import Histogram, Series
from app.observability.throttling import Throttling

# One series less a histogram; Prometheus has no use for the time a counter was made.
disable_created_metrics()  # type: ignore[no-untyped-call]

LIFE = ("upload", "decode", "queue", "infer", "postprocess")
STAGES = LIFE[1:]
"""What one image goes through; an upload is a request's, however many images it brings."""
REJECTIONS = ("queue_full", "decode_queue_full", "buffer_full", "deadline", "not_ready")
MEMORY_KINDS = ("allocated", "reserved", "used", "total")
TELEMETRY = {
    "utilization_ratio": "Share of the time the device is busy",
    "power_watts": "Power the device draws",
    "temperature_celsius": "Temperature of the device",
    "memory_temperature_celsius": "Temperature of the device's memory",
    "clock_hertz": "Clock of the device's cores now",
    "healthy": "1 where the vendor's software calls the device healthy, 0 where it does not",
}
THROTTLED = {"heat": "heat_throttled", "power": "power_throttled"}
"""Why a device runs slower than it could, and what Telemetry calls it."""
MEMORY_ERRORS = {"corrected": "corrected_memory_errors", "uncorrected": "uncorrected_memory_errors"}
CODES = ("OK", "CANCELLED", *get_args(Code))
MODELLESS: tuple[Code, ...] = ("UNAUTHORIZED", "FORBIDDEN", "MODEL_NOT_FOUND", "NOT_FOUND", "METHOD_NOT_ALLOWED")
"""Outcomes of requests that named no model, or none that exists: their `model` is empty."""

_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.015, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
_STAGE_SECONDS = (0.0001, 0.00025, *_SECONDS)
_SLACK_SECONDS = (0, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)

Exemplar = dict[str, str]


class Metrics:
    """The service's metrics; one instance a service, so that tests do not share counters."""

    def __init__(self, *, enabled: bool = True) -> None:
        """`enabled`: where False, nothing is counted, at no cost."""
        self.registry = registry = CollectorRegistry()
        self.enabled = enabled

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, labels, registry=registry) if enabled else cast(Counter, _NOTHING)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(name, text, labels, registry=registry) if enabled else cast(Gauge, _NOTHING)

        def histogram(name: str, text: str, buckets: Sequence[float], *labels: str) -> Histogram:
            if not enabled:
                return cast(Histogram, _NOTHING)
            return Histogram(name, text, labels, registry=registry, buckets=buckets)

        if enabled:
            ProcessCollector(registry=registry)
            PlatformCollector(registry=registry)
            GCCollector(registry=registry)
            registry.register(Throttling())
        self.build_info = gauge("anychip_build_info", "Versions that serve; always 1", "version", "python", "torch")
        self.build_info.labels(version(), platform.python_version(), _version_of("torch")).set(1)
        self.ready = gauge("anychip_ready", "1 while every model has a worker and the service is not shutting down")
        self.event_loop_stall = gauge(
            "anychip_event_loop_stall_seconds", "Longest time the event loop stood still since the service was ready"
        )
        self.cpu_fallback = gauge(
            "anychip_cpu_fallback", "1 where --device auto found no accelerator that can be used, and the CPU serves"
        )

        self.requests = counter("anychip_requests_total", "Requests answered, by outcome", "model", "code")
        for code in MODELLESS:
            self.requests.labels("", code)
        self.request_seconds = histogram(
            "anychip_request_seconds",
            "Time from a request's first byte to its answer; only of requests that were answered",
            _SECONDS,
            "model",
        )
        self.stage_seconds = histogram(
            "anychip_stage_seconds",
            "Time an image spends in each stage; of the upload, a request",
            _STAGE_SECONDS,
            *("model", "stage"),
        )
        self.deadline_slack = histogram(
            "anychip_deadline_slack_seconds",
            "Time left to the deadline when an image was done",
            _SLACK_SECONDS,
            "model",
        )
        self.batch_size = histogram("anychip_batch_size", "Images in a batch", _BATCH_SIZES, "model", "device")
        self.batch_seconds = histogram(
            "anychip_batch_seconds", "Time a device takes for a batch", _STAGE_SECONDS, "model", "device"
        )
        self.batch_padding = counter(
            "anychip_batch_padding_total", "Places in batches that no image filled", "model", "device"
        )
        self.decode_depth = gauge(
            "anychip_decode_depth", "Images that are being decoded or wait for a decoder, of all models"
        )
        self.decode_limit = gauge("anychip_decode_limit", "Images that may be decoded or wait for it")
        self.cache_free = gauge("anychip_cache_dir_free_bytes", "Free space where --cache-dir lies; NaN if unknown")
        self.device_decodes = counter(
            "anychip_device_decodes_total",
            "Images that a device was to decode: decoded, or refused, which the host then decoded",
            *("model", "device", "outcome"),
        )
        self.decoders_up = gauge("anychip_decoders_up", "Processes that decode images and are ready")
        self.decoder_restarts = counter(
            "anychip_decoder_restarts_total", "Decoder processes replaced, as they died or hung", "reason"
        )
        for reason in ("died", "hung"):
            self.decoder_restarts.labels(reason)
        self.queue_depth = gauge("anychip_queue_depth", "Images waiting for a worker", "model")
        self.queue_reserved = gauge(
            "anychip_queue_reserved", "Images being decoded for which room in the queue is reserved", "model"
        )
        self.queue_limit = gauge("anychip_queue_limit", "Images that may wait, reservations included", "model")
        self.images_in_flight = gauge("anychip_images_in_flight", "Images accepted and not yet answered", "model")
        self.slots_taken = gauge(
            "anychip_slots_taken",
            "Slots of shared memory in use: one an image, from its decoding to its answer",
            "model",
        )
        self.rejected = counter("anychip_rejected_total", "Images refused at the door", "model", "reason")
        self.cancelled = counter(
            "anychip_cancelled_total", "Images whose client left, by the stage they had reached", "model", "stage"
        )
        self.expired = counter(
            "anychip_expired_total",
            "Images accepted whose deadline passed, by the stage they had reached",
            "model",
            "stage",
        )
        self.wasted = counter(
            "anychip_wasted_total", "Images computed for nobody: the client had left, or the deadline passed", "model"
        )
        self.retried = counter("anychip_retried_total", "Images computed again because their worker failed", "model")
        self.out_of_memory = counter(
            "anychip_out_of_memory_total", "Batches cut because the device had no memory for them", "model", "device"
        )

        self.device_info = gauge(
            "anychip_device_info",
            "Which card a device is; always 1. Empty is what the vendor's software does not say",
            *("device", "vendor", "name", "uuid", "pci"),
        )
        self.worker_up = gauge("anychip_worker_up", "1 while a worker serves the device", "device")
        self.worker_restarts = counter("anychip_worker_restarts_total", "Workers started again", "device", "reason")
        self.worker_resident = gauge("anychip_worker_resident_bytes", "Host memory of a device's workers", "device")
        self.handovers = counter(
            "anychip_handovers_total", "Workers replaced by another while they served", "device", "reason"
        )
        self.cache_releases = counter(
            "anychip_cache_releases_total", "Rungs of the memory guard that were climbed", "device", "rung", "trigger"
        )
        self.cache_released_bytes = counter(
            "anychip_cache_released_bytes_total", "Bytes that rungs of the memory guard returned", "device", "rung"
        )
        self.device_memory = gauge("anychip_device_memory_bytes", "Memory of a device", "device", "vendor", "kind")
        self.telemetry = {
            name: gauge(f"anychip_device_{name}", f"{text}; NaN where the device does not say", "device", "vendor")
            for name, text in TELEMETRY.items()
        }
        self.energy = counter(
            "anychip_device_energy_joules_total",
            "Energy a device has used since its worker started",
            "device",
            "vendor",
        )
        self.throttled = gauge(
            "anychip_device_throttled",
            "1 while the device runs slower than it could, by reason; NaN where it does not say",
            *("device", "vendor", "reason"),
        )
        self.memory_errors = counter(
            "anychip_device_memory_errors_total",
            "Errors of the device's memory (ECC) since its worker started",
            *("device", "vendor", "kind"),
        )
        self.driver_errors = counter(
            "anychip_device_driver_errors_total",
            "Errors that the driver reported of the device (NVIDIA: XIDs) since its worker started",
            *("device", "vendor"),
        )
        self.operator_fallbacks = counter(
            "anychip_operator_fallbacks_total",
            "Operators that ran on the CPU because the device lacks them",
            *("device", "operator"),
        )

        self.model_info = gauge(
            "anychip_model_info", "How a model is served; always 1", "model", "device", "engine", "precision", "weights"
        )
        self.model_load = gauge(
            "anychip_model_load_seconds",
            "Time a worker took to load a model, compiling and the gate included",
            *("model", "device"),
        )
        self.precision_error = gauge(
            "anychip_precision_error",
            "Largest errors against float32 that the gate has measured (docs/precision.md)",
            *("model", "device", "measure"),
        )
        self.precision_gate = gauge(
            "anychip_precision_gate",
            "1 for what passed the gate and serves, 0 for what it refused for wrong answers (docs/precision.md)",
            *("model", "device", "engine", "precision"),
        )

    def render(self, accept: str) -> tuple[bytes, str]:
        """The exposition that a scraper with this Accept header reads, and its content type. Takes milliseconds.

        Raises ValueError for a version in it that is no version.
        """
        try:
            encoder, content_type = choose_encoder(accept)
        except TypeError:  # It compares a version that is none with numbers.
            raise ValueError("no version") from None
        return encoder(self.registry), content_type


class ModelMetrics:
    """The children of one model, looked up once."""

    def __init__(self, metrics: Metrics, model: str) -> None:
        self.request_seconds = metrics.request_seconds.labels(model)
        self.stage_seconds = {stage: metrics.stage_seconds.labels(model, stage) for stage in LIFE}
        self.deadline_slack = metrics.deadline_slack.labels(model)
        self.queue_depth = metrics.queue_depth.labels(model)
        self.queue_reserved = metrics.queue_reserved.labels(model)
        self.queue_limit = metrics.queue_limit.labels(model)
        self.images_in_flight = metrics.images_in_flight.labels(model)
        self.slots_taken = metrics.slots_taken.labels(model)
        self.wasted = metrics.wasted.labels(model)
        self.retried = metrics.retried.labels(model)
        self.rejected = {reason: metrics.rejected.labels(model, reason) for reason in REJECTIONS}
        self.cancelled = {stage: metrics.cancelled.labels(model, stage) for stage in LIFE}
        self.expired = {stage: metrics.expired.labels(model, stage) for stage in LIFE}
        self._requests = {code: metrics.requests.labels(model, code) for code in CODES if code not in MODELLESS}
        self._metrics = metrics
        self._model = model
        self._batches: dict[str, tuple[Series, Counter]] = {}
        self._batch_seconds: dict[str, Series] = {}

    def answered(self, code: str, seconds: float, exemplar: Exemplar | None) -> None:
        """Count a request that ended with `code`, "OK" or an error's; `exemplar` names its trace."""
        (self._requests.get(code) or self._metrics.requests.labels(self._model, code)).inc()
        if code == "OK":  # Refusals take microseconds: with them latency would look best when most is refused.
            self.request_seconds.observe(seconds, exemplar)

    def batch(self, device: str) -> tuple[Series, Counter]:
        """Batch sizes and padding on a device."""
        if device not in self._batches:
            labels = (self._model, device)
            self._metrics.out_of_memory.labels(*labels)
            self._batches[device] = (
                self._metrics.batch_size.labels(*labels),
                self._metrics.batch_padding.labels(*labels),
            )
        return self._batches[device]

    def device_decodes(self, device: str, *, decoded: int, refused: int) -> None:
        """Count images that a device was to decode."""
        self._metrics.device_decodes.labels(self._model, device, "decoded").inc(decoded)
        self._metrics.device_decodes.labels(self._model, device, "refused").inc(refused)

    def batch_seconds(self, device: str) -> Series:
        """Time of batches on a device."""
        if device not in self._batch_seconds:
            self._batch_seconds[device] = self._metrics.batch_seconds.labels(self._model, device)
        return self._batch_seconds[device]


class States:
    """A gauge that says what is so now: series that are no longer so go, those that are stay, at no moment none."""

    def __init__(self, gauge: Gauge) -> None:
        self._gauge = gauge
        self._shown: set[tuple[str, ...]] = set()

    def show(self, values: Mapping[tuple[str, ...], float]) -> None:
        """Show these values by labels, and nothing else."""
        for labels, value in values.items():
            self._gauge.labels(*labels).set(value)
        for labels in self._shown - values.keys():
            self._gauge.remove(*labels)
        self._shown = set(values)


def version() -> str:
    """Of anychip, as installed; empty where it only lies in a folder."""
    return _version_of("anychip")


def _version_of(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


class _Nothing:
    """Stands in for every metric and child where nothing is counted."""

    def labels(self, *_: str) -> _Nothing:
        return self

    def remove(self, *_: str) -> None: ...

    def inc(self, amount: float = 1) -> None: ...

    def set(self, value: float) -> None: ...

    def set_function(self, function: Any) -> None: ...

    def observe(self, amount: float, exemplar: Exemplar | None = None) -> None: ...


_NOTHING = _Nothing()
