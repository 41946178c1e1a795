"""The service in one small JSON: `GET /v1/stats`, and `GET /v1/stats/stream`, which sends it again and again.

Owns: its shape, and that the numbers are collected once for all listeners. They are those of /metrics, counted since
the start: a client that wants a rate asks twice. Must not collect in the event loop: that takes milliseconds, so a
thread does it, and for the stream only while a client listens.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from math import isfinite

import orjson
from fastapi import APIRouter, Request, Response
from prometheus_client import Metric
from pydantic import BaseModel
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from app import clock
from app.access.access import Caller
from app.errors import ServiceError
from app.http.edge import BIND
from app.ingress.budget import Budget
from app.link import Link, ShadowReport
from app.observability.metrics import MEMORY_ERRORS, MEMORY_KINDS, STAGES, TELEMETRY, THROTTLED, version

INTERVAL_S = 0.5
MAX_LISTENERS = 16
_STARTED_S = clock.monotonic()

router = APIRouter(tags=["status"])


class Times(BaseModel):
    """Count and total seconds; `buckets`: how many took up to so many seconds, by that number as text."""

    count: int
    seconds: float
    buckets: dict[str, int] = {}


class ModelSnapshot(BaseModel):
    """A model. `requests` by outcome, `rejected` by reason, `cancelled` and `expired` by stage: without zeros.

    `images` were answered; `images_computed` may be in vain, or twice. `memory_bytes`: on all devices together.
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
    memory_bytes: int
    request_seconds: Times
    stage_seconds: dict[str, Times]


class DeviceSnapshot(BaseModel):
    """A device; null: it does not report that. `restarts` and `handovers` by reason, `cache_releases` by rung.

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
    """Numbers of the processes that decode images; 0 of them if nothing is decoded. `restarts` by reason."""

    up: int
    waiting: int
    restarts: dict[str, int]


class ClientSnapshot(BaseModel):
    """A client, a key or an address, since it is remembered. `refused`: its requests that ended in errors."""

    client: str
    requests: int
    refused: int


class Snapshot(BaseModel):
    """All numbers of the service. Triton's statistics of a model are another form: app.observability.triton_statistics.

    `clients`: the busiest first; if there are keys, only administrators see them.
    """

    version: str
    uptime_s: float
    ready: bool
    simulated: bool
    models: list[ModelSnapshot]
    devices: list[DeviceSnapshot]
    decoders: DecodersSnapshot
    shadows: list[ShadowReport]
    clients: list[ClientSnapshot] = []


class _Samples:
    """Values of the registry by name and labels."""

    def __init__(self, families: list[Metric]) -> None:
        self._found: dict[str, list[tuple[dict[str, str], float]]] = {}
        for family in families:
            for sample in family.samples:
                self._found.setdefault(sample.name, []).append((sample.labels, sample.value))

    def by(self, label: str, name: str, **labels: str) -> dict[str, float]:
        """Sum by the value of one label the samples that have the other labels."""
        sums: dict[str, float] = {}
        for given, value in self._found.get(name, ()):
            if labels.items() <= given.items():
                sums[given.get(label, "")] = sums.get(given.get(label, ""), 0.0) + value
        return sums

    def counts(self, label: str, name: str, **labels: str) -> dict[str, int]:
        """Return `by` in whole numbers, without zeros."""
        return {key: int(value) for key, value in self.by(label, name, **labels).items() if value}

    def total(self, name: str, **labels: str) -> int:
        """Sum the samples that have these labels."""
        return int(sum(self.by("", name, **labels).values()))

    def known(self, name: str, **labels: str) -> float | None:
        """Return the sum, None if there is none or it is not a number."""
        found = list(self.by("", name, **labels).values())
        return found[0] if found and isfinite(found[0]) else None

    def times(self, name: str, *, buckets: bool = False, **labels: str) -> Times:
        """Return a histogram's sums."""
        return Times(
            count=self.total(f"{name}_count", **labels),
            seconds=sum(self.by("", f"{name}_sum", **labels).values()),
            buckets={le: int(value) for le, value in self.by("le", f"{name}_bucket", **labels).items()}
            if buckets
            else {},
        )


def snapshot(link: Link) -> Snapshot:
    """Collect the numbers of this moment."""
    samples = _Samples(list(link.metrics.registry.collect()))
    ask = link.administration
    workers = ask.workers()
    return Snapshot(
        version=version(),
        uptime_s=round(clock.monotonic() - _STARTED_S, 3),
        ready=not ask.why_not(),
        simulated=link.simulated,
        models=[_model(samples, name, ready=ask.state(name)[0].is_ready) for name in link.models],
        devices=[
            _device(samples, each.device, each.vendor, workers.count(each.device)) for each in ask.devices().devices
        ],
        decoders=DecodersSnapshot(
            up=samples.total("anychip_decoders_up"),
            waiting=samples.total("anychip_decode_depth"),
            restarts=samples.counts("reason", "anychip_decoder_restarts_total"),
        ),
        shadows=ask.shadows(),
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
        memory_bytes=total("model_memory_bytes"),
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


class StatsFeed:
    """The numbers of a service, collected twice a second for all listeners. Belongs to one event loop."""

    def __init__(self, link: Link, interval_s: float = INTERVAL_S) -> None:
        self._link = link
        self._interval_s = interval_s
        self._next: asyncio.Task[bytes] | None = None
        self._collected_s = 0.0
        self.listeners = Budget(MAX_LISTENERS, "listeners to the numbers")
        """Budget of listeners; each takes one, under the caller's name."""

    async def events(self, admitted: Callable[[], bool]) -> AsyncIterator[bytes]:
        """Send server-sent events, each with the JSON of `/v1/stats`. A slow listener misses some and is never behind.

        Ends when the service shuts down, or the listener is not `admitted` any more: its key was taken back.
        """
        yield b"retry: 2000\n\n"
        while not self._link.administration.draining:
            text = await asyncio.shield(self._following())
            if not admitted():
                break
            yield b"event: stats\ndata: " + text + b"\n\n"

    def _following(self) -> asyncio.Task[bytes]:
        """Return the task of the next collection, for all who wait for it."""
        if self._next is None:
            self._next = asyncio.create_task(self._collect(), name="stats-feed")
        return self._next

    async def _collect(self) -> bytes:
        loop = asyncio.get_running_loop()
        try:
            await asyncio.sleep(max(0.0, self._collected_s + self._interval_s - loop.time()))
            self._collected_s = loop.time()
            return await asyncio.to_thread(_collected_json, self._link)
        finally:
            self._next = None


def _collected_json(link: Link, *, clients: bool = False) -> bytes:
    """Collect the numbers as JSON. It takes milliseconds and belongs in a thread, off the event loop."""
    found = snapshot(link)
    if clients:
        for each in link.metrics.clients.busiest():
            found.clients.append(ClientSnapshot(client=each.name, requests=each.requests, refused=each.refused))
    return orjson.dumps(found.model_dump())


class _EventStream(StreamingResponse):
    """Stream that leaves its feed however it ends, also when not one event was sent."""

    def __init__(self, feed: StatsFeed, caller: str, admitted: Callable[[], bool]) -> None:
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        super().__init__(feed.events(admitted), media_type="text/event-stream", headers=headers)
        self._feed, self._caller = feed, caller

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._feed.listeners.give(self._caller, 1)


@router.get("/v1/stats", response_model=Snapshot)
async def stats(request: Request) -> Response:
    """Return the numbers of /metrics in one small JSON, counted since the start; `anychip top` shows them."""
    caller: Caller = request.scope["anychip"].caller
    content = await asyncio.to_thread(_collected_json, request.app.state.link, clients=caller.sees_others)
    return Response(content, media_type="application/json")


@router.get("/v1/stats/stream", response_class=Response)
async def stats_stream(request: Request) -> Response:
    """Send the answer of `/v1/stats` twice a second, as server-sent events of the name `stats`."""
    state = request.app.state
    feed: StatsFeed = state.stats_feed
    access, scope = state.ingress.access, request.scope

    def admitted() -> bool:
        try:
            access.admit("infer", scope.get(BIND, "public"), scope["headers"], scope["anychip"].address)
        except ServiceError:
            return False
        return True

    caller = scope["anychip"].caller.name
    feed.listeners.take(caller, 1)
    return _EventStream(feed, caller, admitted)
