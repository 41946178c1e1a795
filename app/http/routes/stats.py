"""The service in one small JSON: `GET /v1/stats`, and `GET /v1/stats/stream`, which sends it again and again.

Owns: its shape, and that the numbers are collected once for all listeners. They are those of /metrics, counted since
the start: a client that wants a rate asks twice. A field that is named like a row of the metrics' table, with or
without the row's first word, is that row. Must not collect in the event loop: that takes milliseconds, so a
thread does it, and for the stream only while a client listens.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from math import isfinite
from typing import Any

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
from app.link import Link
from app.observability.metrics import MEMORY_ERRORS, MEMORY_KINDS, STAGES, TABLE, THROTTLED, version
from app.observability.metrics import Metric as Row

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
    clients: list[ClientSnapshot] = []


_VALUES: dict[str, Iterable[str]] = {
    "throttled": THROTTLED,
    "memory_errors": MEMORY_ERRORS,
    "memory_bytes": MEMORY_KINDS,
}
"""Values of the last label, of what a device may report of itself or not."""


class _Samples:
    """Values of the registry by name and labels."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._found: dict[str, list[tuple[dict[str, str], float]]] = {}
        for sample in [sample for family in families for sample in family.samples]:
            self._found.setdefault(sample.name, []).append((sample.labels, sample.value))

    def by(self, label: str, name: str, **labels: str) -> dict[str, float]:
        """Sum by the value of one label the samples that have the other labels; with "" all of them under ""."""
        sums: dict[str, float] = {}
        for given, value in self._found.get(name, ()):
            if labels.items() <= given.items():
                sums[given.get(label, "")] = sums.get(given.get(label, ""), 0.0) + value
        return sums

    def total(self, name: str, **labels: str) -> int:
        """Sum the samples that have these labels."""
        return int(sum(self.by("", name, **labels).values()))

    def times(self, name: str, **labels: str) -> Times:
        """Return a histogram's sums."""
        seconds = sum(self.by("", f"{name}_sum", **labels).values())
        return Times(count=self.total(f"{name}_count", **labels), seconds=seconds)

    def numbers(self, document: type[BaseModel], of: str, name: str) -> dict[str, Any]:
        """Return the fields of a document that are rows of the metrics' table, for the model or device of this name.

        A field's type says how: a sum, sums by the second label without zeros, or readings that may be unknown.
        """
        numbers: dict[str, Any] = {}
        for field, about in document.model_fields.items():
            rows = [TABLE.get(f"{kind}{field}") for kind in ("", f"{of}_", "worker_", "batch_")]
            row = next((row for row in rows if row is not None and of in row.labels), None)
            if row is None:
                continue
            known = {key: value if isfinite(value) else None for key, value in self._of(row, of, name).items()}
            if about.annotation is int:
                numbers[field] = self.total(row.name, **{of: name})
            elif about.annotation == dict[str, int]:
                numbers[field] = {key: int(value) for key, value in known.items() if value}
            elif about.annotation == dict[str, float | None]:
                numbers[field] = {value: known.get(value) for value in _VALUES[field]}
            elif about.annotation == float | None:
                numbers[field] = next(iter(known.values()), None)
        return numbers

    def _of(self, row: Row[Any], of: str, name: str) -> dict[str, float]:
        """Sum a row for a model or device, by its first label that says what was counted or read."""
        label = next((label for label in row.labels if label not in ("model", "device", "vendor")), "")
        return self.by(label, row.name, **{of: name})


def snapshot(link: Link) -> Snapshot:
    """Collect the numbers of this moment."""
    samples = _Samples(link.metrics.registry.collect())
    ask = link.administration
    workers = ask.workers()

    def batches(images: str, **of: str) -> dict[str, Any]:
        sizes = {images: "sum", "batches": "count"}
        return {field: samples.total(f"anychip_batch_size_{part}", **of) for field, part in sizes.items()}

    def model(name: str) -> ModelSnapshot:
        requests = samples.times("anychip_request_seconds", model=name)
        buckets = samples.by("le", "anychip_request_seconds_bucket", model=name)
        requests.buckets = {bound: int(count) for bound, count in buckets.items()}
        stages = {stage: samples.times("anychip_stage_seconds", model=name, stage=stage) for stage in STAGES}
        return ModelSnapshot(
            model=name,
            ready=ask.state(name)[0].is_ready,
            images=stages["postprocess"].count,
            request_seconds=requests,
            stage_seconds=stages,
            **batches("images_computed", model=name),
            **samples.numbers(ModelSnapshot, "model", name),
        )

    def device(name: str, vendor: str) -> DeviceSnapshot:
        up = workers.count(name)
        numbers = batches("images", device=name) | samples.numbers(DeviceSnapshot, "device", name)
        return DeviceSnapshot(device=name, vendor=vendor, up=up > 0, workers=up, **numbers)

    restarts = samples.by("reason", "anychip_decoder_restarts_total")
    return Snapshot(
        version=version(),
        uptime_s=round(clock.monotonic() - _STARTED_S, 3),
        ready=not ask.why_not(),
        simulated=link.simulated,
        models=[model(name) for name in link.models],
        devices=[device(each.device, each.vendor) for each in ask.devices().devices],
        decoders=DecodersSnapshot(
            up=samples.total("anychip_decoders_up"),
            waiting=samples.total("anychip_decode_depth"),
            restarts={reason: int(count) for reason, count in restarts.items() if count},
        ),
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
            if self._next is None:
                self._next = asyncio.create_task(self._collect(), name="stats-feed")
            text = await asyncio.shield(self._next)
            if not admitted():
                break
            yield b"event: stats\ndata: " + text + b"\n\n"

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
async def get_stats(request: Request) -> Response:
    """Return the numbers of /metrics in one small JSON, counted since the start; `anychip top` shows them."""
    caller: Caller = request.scope["anychip"].caller
    content = await asyncio.to_thread(_collected_json, request.app.state.link, clients=caller.sees_others)
    return Response(content, media_type="application/json")


@router.get("/v1/stats/stream", response_class=Response)
async def stream_stats(request: Request) -> Response:
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
