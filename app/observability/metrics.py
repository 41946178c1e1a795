"""All metrics that the service exports: names, help, labels and buckets; and what a request records in them.

Owns: one registry for server and workers (workers report over their pipe: see device_metrics); histograms without
prometheus_client's locks and walk over the buckets; the busiest clients; and where each stage of a request is written:
metrics, Triton's statistics, the Server-Timing header. Label children are made once a model and device, so that the hot
path only adds numbers. Known label values are present from the start, at 0: Prometheus sees no increase in a counter
that begins with 1. One thread counts (the event loop's), others may read. Must not decide anything.
"""

from __future__ import annotations

import platform
import re
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import inf
from pathlib import Path
from typing import Any, Generic, TypeVar, get_args

import msgspec
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    GCCollector,
    PlatformCollector,
    ProcessCollector,
    core,
    disable_created_metrics,
)
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from anychip_base.extras import version, version_of
from app import clock
from app.errors import ClientLeftError, Code, ServiceError
from app.observability.tracing import RequestTrace
from app.observability.triton_statistics import ModelStatistics

BUSIEST = 10
_REMEMBERED = 1000
"""Most clients remembered; above it the idler half is forgotten."""
_HALF_LIFE_S = 30.0
_CGROUP = Path("/sys/fs/cgroup")


@dataclass(slots=True)
class ClientCount:
    """Requests of a client since it is remembered; `refused`: those that ended with an error."""

    name: str
    requests: int = 0
    refused: int = 0
    weight: float = 0.0
    seen_s: float = 0.0

    def busy(self, now_s: float) -> float:
        """Return the number of its requests, each worth half after half a minute."""
        return self.weight * float(2 ** ((self.seen_s - now_s) / _HALF_LIFE_S))


class BusiestClients(Collector):
    """Counter of one service's clients. Counted in the event loop, read by any thread."""

    def __init__(self) -> None:
        self._clients: dict[str, ClientCount] = {}

    def count(self, name: str, *, refused: int, requests: int = 1, now_s: float | None = None) -> None:
        """Count ended requests of this client, of which so many were refused."""
        now_s = clock.monotonic() if now_s is None else now_s
        client = self._clients.get(name)
        if client is None:
            if len(self._clients) >= _REMEMBERED:
                self._clients = {each.name: each for each in self.busiest(_REMEMBERED // 2, now_s)}
            client = self._clients[name] = ClientCount(name)
        client.requests += requests
        client.refused += refused
        client.weight, client.seen_s = client.busy(now_s) + requests, now_s

    def taken(self) -> dict[str, tuple[int, int]]:
        """Return requests and refusals by client, and forget them."""
        clients, self._clients = self._clients, {}
        return {name: (each.requests, each.refused) for name, each in clients.items()}

    def busiest(self, most: int = BUSIEST, now_s: float | None = None) -> list[ClientCount]:
        """Return at most so many clients, the busiest of the last minute first."""
        now_s = clock.monotonic() if now_s is None else now_s
        clients = list(self._clients.values())  # At once: another thread may count meanwhile.
        return sorted(clients, key=lambda each: each.busy(now_s), reverse=True)[:most]

    def collect(self) -> Iterator[CounterMetricFamily]:
        """Yield the requests of the busiest clients only."""
        text = f"Requests of the {BUSIEST} busiest clients now, by key or address"
        family = CounterMetricFamily("anychip_client_requests", text, labels=("client", "outcome"))
        for each in self.busiest():
            family.add_metric((each.name, "answered"), each.requests - each.refused)
            family.add_metric((each.name, "refused"), each.refused)
        yield family


class Throttling(Collector):
    """Counter of the time for which the container's processor limit stopped the service; 0 without a control group."""

    def collect(self) -> Iterator[CounterMetricFamily]:
        """Yield the counter of this process's control group, as a container sees it."""
        text, seconds = "Time that the container's processor limit held its processes up", 0.0
        # Version 2 counts in microseconds and for the group itself; version 1 in nanoseconds, below a folder.
        for file, field, unit in (("cpu.stat", "throttled_usec", 1e6), ("cpu/cpu.stat", "throttled_time", 1e9)):
            try:
                found = re.search(rf"^{field} (\d+)$", (_CGROUP / file).read_text(encoding="ascii"), re.MULTILINE)
            except (OSError, ValueError):
                continue
            if found:
                seconds = int(found[1]) / unit
                break
        yield CounterMetricFamily("anychip_cpu_throttled_seconds", text, seconds)


class Series:
    """Series of one combination of labels. `exemplars`: the last measurement of each bucket whose trace is known."""

    __slots__ = ("_bounds", "counts", "exemplars", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.exemplars: dict[int, core.Exemplar] = {}
        self.sum = 0.0

    def observe(self, amount: float, exemplar: dict[str, str] | None = None) -> None:
        """Count a measurement; `exemplar` labels it."""
        bucket = bisect_left(self._bounds, amount)
        self.counts[bucket] += 1
        self.sum += amount
        if exemplar is not None:
            self.exemplars[bucket] = core.Exemplar(exemplar, amount, time.time())

    def add(self, counts: Sequence[int], total: float, seen: Mapping[int, tuple[dict[str, str], float]]) -> None:
        """Add the counts of a series with the same bounds. Raises ValueError for other bounds."""
        self.counts = [own + more for own, more in zip(self.counts, counts, strict=True)]
        self.sum += total
        for bucket, (labels, amount) in seen.items():
            self.exemplars[bucket] = core.Exemplar(labels, amount, time.time())

    def clear(self) -> None:
        """Reset all counts to zero."""
        self.counts, self.sum, self.exemplars = [0] * len(self.counts), 0.0, {}


class Histogram(Collector):
    """Registered family of series; used as prometheus_client's is."""

    def __init__(
        self, name: str, text: str, labels: Sequence[str], *, buckets: Sequence[float], registry: CollectorRegistry
    ) -> None:
        """Register an empty family. `buckets`: upper bounds, ascending, without infinity."""
        if list(buckets) != sorted(set(buckets)) or not buckets:
            raise ValueError("buckets ascend")
        self._name, self._text, self._labels = name, text, tuple(labels)
        self._bounds = tuple(float(bound) for bound in buckets)
        self._texts = [str(floatToGoString(bound)) for bound in (*self._bounds, inf)]  # type: ignore[no-untyped-call]
        self.series: dict[tuple[str, ...], Series] = {}
        registry.register(self)

    def labels(self, *values: str) -> Series:
        """Return the series of these labels."""
        if len(values) != len(self._labels):
            raise ValueError(f"{self._name} has the labels {', '.join(self._labels)}")
        return self.series.setdefault(values, Series(self._bounds))

    def describe(self) -> list[HistogramMetricFamily]:
        """Return the family, empty."""
        return [HistogramMetricFamily(self._name, self._text, labels=self._labels)]

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """Yield the family as it is now."""
        [family] = self.describe()
        for labels, series in [*self.series.items()]:
            total = series.sum  # Before the counts: a sum without its measurement is worse than the reverse.
            sofar = 0
            buckets: list[tuple[str, float] | tuple[str, float, core.Exemplar]] = []
            for number, (text, count) in enumerate(zip(self._texts, [*series.counts], strict=True)):
                sofar += count
                exemplar = series.exemplars.get(number)
                buckets.append((text, sofar) if exemplar is None else (text, sofar, exemplar))
            family.add_metric(labels, buckets, total)
        yield family


# One series less a histogram; Prometheus has no use for the time a counter was made.
disable_created_metrics()  # type: ignore[no-untyped-call]

LIFE = ("upload", "decode", "queue", "infer", "postprocess")
STAGES = LIFE[1:]
"""Stages of one image; an upload is a request's, however many images it brings."""
REJECTIONS = ("queue_full", "decode_queue_full", "buffer_full", "deadline", "not_ready", "loading")
MEMORY_KINDS = ("allocated", "reserved", "used", "total")
TELEMETRY = (
    "utilization_ratio",
    "power_watts",
    "temperature_celsius",
    "memory_temperature_celsius",
    "clock_hertz",
    "healthy",
)
_OR_NAN = "; NaN where the device does not say"
THROTTLED = {"heat": "heat_throttled", "power": "power_throttled"}
MEMORY_ERRORS = {"corrected": "corrected_memory_errors", "uncorrected": "uncorrected_memory_errors"}
CODES = ("OK", "CANCELLED", *get_args(Code))
MODELLESS: tuple[Code, ...] = ("UNAUTHORIZED", "FORBIDDEN", "MODEL_NOT_FOUND", "NOT_FOUND", "METHOD_NOT_ALLOWED")
"""Outcomes of requests that named no model, or none that exists: their `model` is empty."""

_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.015, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
_STAGE_SECONDS = (0.0001, 0.00025, *_SECONDS)
_SLACK_SECONDS = (0, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)

Exemplar = dict[str, str]


_Kind = TypeVar("_Kind")


class Metric(Generic[_Kind]):
    """Row of the table below; its name is Prometheus's without `anychip_` in front and a counter's `_total`."""

    name: str

    def __init__(self, kind: Callable[..., _Kind], labels: str, text: str, buckets: Sequence[float] = ()) -> None:
        """Describe a metric. `labels`: their names; `buckets`: a histogram's upper bounds."""
        self.kind, self.labels, self.text, self._buckets = kind, labels.split(), text, buckets

    def __set_name__(self, _: type[Metrics], name: str) -> None:
        self.name = f"anychip_{name}_total" if self.kind is Counter else f"anychip_{name}"

    def __get__(self, metrics: Metrics, _: type[Metrics]) -> _Kind:
        """Give type checkers the type; `Metrics` sets the attribute that hides the row."""
        raise AttributeError(self.name)

    def made(self, registry: CollectorRegistry) -> _Kind:
        """Make the metric in a registry."""
        more = {"buckets": self._buckets} if self._buckets else {}
        return self.kind(self.name, self.text, self.labels, registry=registry, **more)


class Metrics:
    """Metrics of a service; one instance a service, so that tests do not share counters."""

    build_info = Metric(Gauge, "version python torch", "Versions that serve; always 1")
    ready = Metric(Gauge, "", "1 while every model has a worker and the service is not shutting down")
    event_loop_stall_seconds = Metric(Gauge, "", "Longest time the event loop stood still since the service was ready")
    cpu_fallback = Metric(Gauge, "", "1 where --device auto found no accelerator that can be used, and the CPU serves")
    requests = Metric(Counter, "model code", "Requests answered, by outcome")
    request_seconds = Metric(
        Histogram,
        "model",
        "Time from a request's first byte to its answer; only of requests that were answered",
        _SECONDS,
    )
    stage_seconds = Metric(
        Histogram, "model stage", "Time an image spends in each stage; of the upload, a request", _STAGE_SECONDS
    )
    deadline_slack_seconds = Metric(
        Histogram, "model", "Time left to the deadline when an image was done", _SLACK_SECONDS
    )
    batch_size = Metric(Histogram, "model device", "Images in a batch", _BATCH_SIZES)
    batch_seconds = Metric(Histogram, "model device", "Time a device takes for a batch", _STAGE_SECONDS)
    batch_padding = Metric(Counter, "model device", "Places in batches that no image filled")
    decode_depth = Metric(Gauge, "", "Images that are being decoded or wait for a decoder, of all models")
    decode_limit = Metric(Gauge, "", "Images that may be decoded or wait for it")
    cache_dir_free_bytes = Metric(Gauge, "", "Free space where --cache-dir lies; NaN if unknown")
    device_decodes = Metric(
        Counter,
        "model device outcome",
        "Images that a device was to decode: decoded, or refused, which the host then decoded",
    )
    decoders_up = Metric(Gauge, "", "Processes that decode images and are ready")
    decoder_restarts = Metric(Counter, "reason", "Decoder processes replaced, as they died or hung")
    ingresses_up = Metric(Gauge, "", "Processes beside the server that answer requests and are ready (--ingresses)")
    ingress_restarts = Metric(Counter, "", "Processes that answer requests replaced, as they died or hung")
    queue_depth = Metric(Gauge, "model", "Images waiting for a worker")
    queue_reserved = Metric(Gauge, "model", "Images being decoded for which room in the queue is reserved")
    queue_limit = Metric(Gauge, "model", "Images that may wait, reservations included")
    images_in_flight = Metric(Gauge, "model", "Images accepted and not yet answered")
    slots_taken = Metric(Gauge, "model", "Slots of shared memory in use: one an image, from its decoding to its answer")
    rejected = Metric(Counter, "model reason", "Images refused at the door")
    cancelled = Metric(Counter, "model stage", "Images whose client left, by the stage they had reached")
    expired = Metric(Counter, "model stage", "Images accepted whose deadline passed, by the stage they had reached")
    wasted = Metric(Counter, "model", "Images computed in vain: the client had left, or the deadline passed")
    retried = Metric(Counter, "model", "Images computed again because their worker failed")
    out_of_memory = Metric(Counter, "model device", "Batches cut because the device had no memory for them")
    device_info = Metric(
        Gauge,
        "device vendor name uuid pci",
        "Which card a device is; always 1. Empty is what the vendor's software does not say",
    )
    worker_up = Metric(Gauge, "device", "1 while a worker serves the device")
    worker_restarts = Metric(Counter, "device reason", "Workers started again")
    worker_resident_bytes = Metric(Gauge, "device", "Host memory of a device's workers")
    handovers = Metric(Counter, "device reason", "Workers replaced by another while they served")
    cache_releases = Metric(Counter, "device rung trigger", "Releases by the memory guard")
    cache_released_bytes = Metric(Counter, "device rung", "Bytes of the device that the memory guard returned")
    cache_released_host_bytes = Metric(Counter, "device rung", "Bytes of the host that the memory guard returned")
    device_memory_bytes = Metric(Gauge, "device vendor kind", "Memory of a device")
    device_utilization_ratio = Metric(Gauge, "device vendor", "Share of the time the device is busy" + _OR_NAN)
    device_power_watts = Metric(Gauge, "device vendor", "Power the device draws" + _OR_NAN)
    device_temperature_celsius = Metric(Gauge, "device vendor", "Temperature of the device" + _OR_NAN)
    device_memory_temperature_celsius = Metric(Gauge, "device vendor", "Temperature of the device's memory" + _OR_NAN)
    device_clock_hertz = Metric(Gauge, "device vendor", "Clock of the device's cores now" + _OR_NAN)
    device_healthy = Metric(
        Gauge, "device vendor", "1 where the vendor's software calls the device healthy, 0 where it does not" + _OR_NAN
    )
    device_energy_joules = Metric(Counter, "device vendor", "Energy a device has used since its worker started")
    device_throttled = Metric(
        Gauge, "device vendor reason", "1 while the device runs slower than it could, by reason" + _OR_NAN
    )
    device_memory_errors = Metric(
        Counter, "device vendor kind", "Errors of the device's memory (ECC) since its worker started"
    )
    device_driver_errors = Metric(
        Counter,
        "device vendor",
        "Errors that the driver reported of the device (NVIDIA: XIDs) since its worker started",
    )
    operator_fallbacks = Metric(
        Counter, "device operator", "Operators that ran on the CPU because the device lacks them"
    )
    model_info = Metric(Gauge, "model device engine precision weights", "How a model is served; always 1")
    model_load_seconds = Metric(
        Gauge, "model device", "Time a worker took to load a model, compiling and the gate included"
    )
    model_memory_bytes = Metric(
        Gauge, "model device", "Memory of the device that a model takes, its largest batch included, as measured"
    )
    model_loads = Metric(Counter, "model outcome", "Loads and unloads of models on demand, while the service ran")
    model_memory_budget_bytes = Metric(
        Gauge, "device", "Memory that models may take together where some are loaded on demand"
    )
    precision_error = Metric(
        Gauge, "model device measure", "Largest errors against float32 that the gate has measured (docs/precision.md)"
    )
    precision_gate = Metric(
        Gauge,
        "model device engine precision",
        "1 for what passed the gate and serves, 0 for what it refused for wrong answers (docs/precision.md)",
    )

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        for name, row in TABLE.items():
            setattr(self, name, row.made(self.registry))
        self.telemetry: dict[str, Gauge] = {name: getattr(self, f"device_{name}") for name in TELEMETRY}
        self.clients = BusiestClients()
        self.registry.register(self.clients)
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        GCCollector(registry=self.registry)
        self.registry.register(Throttling())
        self.build_info.labels(version(), platform.python_version(), version_of("torch")).set(1)
        for code in MODELLESS:
            self.requests.labels("", code)
        for reason in ("died", "hung"):
            self.decoder_restarts.labels(reason)

    def render(self, accept: str) -> tuple[bytes, str]:
        """Return the exposition for a scraper's Accept header, and its content type. Takes milliseconds.

        Raises ValueError for an invalid version in it.
        """
        try:
            encoder, content_type = choose_encoder(accept)
        except TypeError:  # It compares a version that is none with numbers.
            raise ValueError("no version") from None
        return encoder(self.registry), content_type


TABLE: dict[str, Metric[Any]] = {name: row for name, row in vars(Metrics).items() if isinstance(row, Metric)}


class ModelMetrics:
    """Label children of one model, looked up once."""

    def __init__(self, metrics: Metrics, model: str) -> None:
        self.request_seconds = metrics.request_seconds.labels(model)
        self.stage_seconds = {stage: metrics.stage_seconds.labels(model, stage) for stage in LIFE}
        self.deadline_slack = metrics.deadline_slack_seconds.labels(model)
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
        self.batch = cache(self._batch)
        """Returns the metrics to record the model's batches on a device: their sizes, unfilled places and seconds."""

    def answered(self, code: str, seconds: float, exemplar: Exemplar | None) -> None:
        """Count a request that ended with `code`, "OK" or an error's; `exemplar` names its trace."""
        (self._requests.get(code) or self._metrics.requests.labels(self._model, code)).inc()
        if code == "OK":  # Refusals take microseconds: with them latency would look best when most is refused.
            self.request_seconds.observe(seconds, exemplar)

    def _batch(self, device: str) -> tuple[Series, Counter, Series]:
        metrics, labels = self._metrics, (self._model, device)
        metrics.out_of_memory.labels(*labels)  # Shows it as 0.
        padding = metrics.batch_padding.labels(*labels)
        return metrics.batch_size.labels(*labels), padding, metrics.batch_seconds.labels(*labels)

    def device_decodes(self, device: str, *, decoded: int, refused: int) -> None:
        """Count images that a device was to decode."""
        self._metrics.device_decodes.labels(self._model, device, "decoded").inc(decoded)
        self._metrics.device_decodes.labels(self._model, device, "refused").inc(refused)


class States:
    """Gauge of states. It replaces the series of ended states without a gap."""

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


class Recorder(msgspec.Struct):
    """Recorder of one request. `trace`: the owner of its spans; `exemplar`: the label of its measurements.

    `seconds`: of each stage; with several images, of the slowest. `abandoned`: the client has left, so later
    cancellations count as its doing.
    """

    seconds: dict[str, float] = msgspec.field(default_factory=dict)
    trace: RequestTrace | None = None
    exemplar: Exemplar | None = None
    abandoned: bool = False

    def timings(self) -> bytes:
        """Return the Server-Timing header: milliseconds of each stage."""
        taken = self.seconds.get
        return b"decode;dur=%.3f, queue;dur=%.3f, infer;dur=%.3f, post;dur=%.3f" % (
            taken("decode", 0.0) * 1e3,
            taken("queue", 0.0) * 1e3,
            taken("infer", 0.0) * 1e3,
            taken("postprocess", 0.0) * 1e3,
        )

    def abandon(self) -> None:
        """Note that the client has left."""
        self.abandoned = True

    def upload_failed(self, metrics: ModelMetrics, error: ServiceError | ClientLeftError) -> None:
        """Count a body that has not arrived. Other errors of it count as the request's outcome alone."""
        if isinstance(error, ClientLeftError):
            metrics.cancelled["upload"].inc()
        elif error.code in ("DEADLINE_EXCEEDED", "REQUEST_TIMEOUT"):
            metrics.expired["upload"].inc()
        elif error.code == "QUEUE_FULL":
            metrics.rejected["buffer_full"].inc()

    def image(
        self, metrics: ModelMetrics, statistics: ModelStatistics, seconds: Mapping[str, float], slack_s: float
    ) -> None:
        """Record an answered item, with its seconds in each stage and its time to the deadline."""
        slowest, exemplar = self.seconds, self.exemplar
        for stage, taken in seconds.items():
            metrics.stage_seconds[stage].observe(taken, exemplar)
            if taken > slowest.get(stage, 0.0):
                slowest[stage] = taken
        metrics.deadline_slack.observe(slack_s)
        statistics.images += 1

    def collected(self, metrics: ModelMetrics, seconds: float) -> None:
        """Record the seconds of a request's answer if its items have none of their own."""
        metrics.stage_seconds["postprocess"].observe(seconds)
        self.seconds["postprocess"] = max(seconds, self.seconds.get("postprocess", 0.0))
