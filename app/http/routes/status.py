"""Status of the service: models, devices, health, metrics; and all numbers in one small JSON, `/v1/stats`.

These are those of /metrics, counted since the start: a client that wants a rate asks twice. A field that is named like
a row of the metrics' table, with or without the row's first word, is that row. A thread collects them, as that takes
milliseconds, once for all listeners of the stream, and only while a client listens.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from math import isfinite
from typing import Any, Literal

import orjson
from fastapi import APIRouter, HTTPException, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import Metric
from pydantic import BaseModel
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from anychip_base.extras import version
from app import clock
from app.access.access import Caller
from app.access.rules import LIVE, READY
from app.core import ServedOn
from app.errors import ServiceError, invalid_request
from app.http.edge import BIND
from app.http.playground.page import PageFile
from app.http.routes.infer import ModelReady
from app.ingress.budget import Budget
from app.link import Devices, Link
from app.observability.metrics import MEMORY_ERRORS, MEMORY_KINDS, STAGES, TABLE, THROTTLED
from models import Finds, Model, PixelModel
from models.contract.cascade import Cascade
from models.tasks.classify import Classify

router = APIRouter(tags=["status"])

INTERVAL_S = 0.5
MAX_LISTENERS = 16
_STARTED_S = clock.monotonic()


class ModelStatus(BaseModel):
    """A model of the service."""

    name: str
    architecture: str
    task: str
    finds: Finds
    weights: str
    weights_sha256: str
    classes: int
    scores: Literal["softmax", "sigmoid"] | None
    input_shape: tuple[int, ...]
    ready: bool
    profile: str
    served_on: list[ServedOn]


class Models(BaseModel):
    """Every model of the service."""

    models: list[ModelStatus]


class ModelLabels(BaseModel):
    """The labels that a model answers with, ready or not; the place in `labels` is the `class_id` of answers."""

    name: str
    task: str
    finds: Finds
    labels: list[str]


class Live(BaseModel):
    """Sign of life: the event loop answers."""

    live: bool


class ReadyBody(BaseModel):
    """Sign that every model has a worker."""

    ready: bool


@router.get("/v1/models")
async def list_models(request: Request) -> Models:
    """List the models, their devices and engines."""
    link: Link = request.app.state.link
    ask = link.administration
    models = [
        _status(
            served.model,
            classes=len(served.model.labels),
            ready=ask.state(name)[0].is_ready,
            profile=ask.profile_of(name),
            served_on=ask.served_on(name),
        )
        for name, served in link.models.items()
    ]
    return Models(models=models + [_cascade(link, cascade) for cascade in link.cascades.values()])


def _status(model: Model, **known: Any) -> ModelStatus:
    """Describe a model; `known`: fields that it does not say itself, or says otherwise."""
    adapter = model.adapter if isinstance(model, PixelModel) else None
    names = "name", "architecture", "task", "finds", "weights", "weights_sha256", "input_shape"
    of_model = {name: getattr(model, name) for name in names}
    scores = adapter.scored_by if isinstance(adapter, Classify) else None
    return ModelStatus(**{**of_model, "scores": scores, **known})


def _cascade(link: Link, cascade: Cascade) -> ModelStatus:
    first, *_, last = (link.models[name].model for name in cascade.models)
    states = [link.administration.state(each)[0] for each in link.parts(cascade.name)]
    return _status(
        first,
        name=cascade.name,
        architecture=" > ".join(cascade.models),
        task=cascade.task or first.task,
        classes=len(last.labels),
        ready=all(state.is_ready for state in states),
        profile="",
        served_on=[],
    )


@router.get("/v1/models/{model}", responses={503: {"description": "Not ready, with the reason"}})
async def get_model(request: Request, model: str) -> ModelReady:
    """Return a model's readiness in KServe's v1 form."""
    if model.endswith(":predict"):  # That path is POST's alone.
        raise HTTPException(405, headers={"Allow": "POST"})
    link: Link = request.app.state.link
    link.administration.check(*link.parts(model))
    return ModelReady(name=model, ready=True)


@router.get("/v1/models/{model}/labels")
async def get_labels(request: Request, model: str, version: str = "") -> ModelLabels:
    """Return a model's task and the labels of its classes, of version 1 by default; of several stages, the first."""
    link: Link = request.app.state.link
    first, cascade = link.find(model, version).model, link.cascades.get(model)
    task = (cascade.task if cascade else "") or first.task
    return ModelLabels(name=model, task=task, finds=first.finds, labels=list(first.labels))


@router.get("/v1/devices")
async def list_devices(request: Request) -> Devices:
    """List the devices in use, and why other vendors were not chosen."""
    link: Link = request.app.state.link
    return link.administration.devices()


@router.get("/", include_in_schema=False)
async def root(request: Request) -> Response:
    """Return the page, if there is one, to clients that ask for HTML; KServe's v1 liveness to all others."""
    if "text/html" not in request.headers.get("accept", ""):
        return JSONResponse({"status": "alive"}, headers={"vary": "accept"})
    page: PageFile | None = request.app.state.page
    if page is None:
        raise ServiceError("NOT_FOUND", "the page is turned off here (--playground)")
    return page.response(request)


async def is_live() -> Live:
    """Answer 200 while the process answers at all. Load balancers' usual paths answer alike."""
    return Live(live=True)


async def is_ready(request: Request) -> ReadyBody:
    """Answer 200 while every model has a worker and the service is not shutting down. Usual paths answer alike."""
    link: Link = request.app.state.link
    link.administration.check()
    return ReadyBody(ready=True)


def _add_probe(paths: Sequence[str], answer: Callable[..., Any], responses: dict[int | str, dict[str, Any]]) -> None:
    first, *others = paths
    router.get(first, responses=responses)(answer)
    for path in others:
        description = f"Answer as `{first}` does."
        router.get(path, name=path.removeprefix("/"), description=description, responses=responses)(answer)


_add_probe(LIVE, is_live, {})
_add_probe(READY, is_ready, {503: {"description": "Not ready, with the reason"}})


@router.get("/metrics", response_class=Response)
async def get_metrics(request: Request) -> Response:
    """Return the metrics for Prometheus; as OpenMetrics, with the traces of some measurements, if asked for."""
    link: Link = request.app.state.link
    try:
        # Rendering takes milliseconds and belongs in a thread, off the event loop.
        content, content_type = await asyncio.to_thread(link.metrics.render, request.headers.get("accept", ""))
    except ValueError:
        raise invalid_request("the Accept header names a version of OpenMetrics that is no version") from None
    return Response(content, headers={"content-type": content_type})


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
    """A device; null: it does not report that. `restarts` and `handovers` by reason, `cache_releases` by release level.

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
            label = next((label for label in row.labels if label not in ("model", "device", "vendor")), "")
            sums = self.by(label, row.name, **{of: name})  # By what was counted or read.
            known = {key: value if isfinite(value) else None for key, value in sums.items()}
            if about.annotation is int:
                numbers[field] = self.total(row.name, **{of: name})
            elif about.annotation == dict[str, int]:
                numbers[field] = {key: int(value) for key, value in known.items() if value}
            elif about.annotation == dict[str, float | None]:
                numbers[field] = {value: known.get(value) for value in _VALUES[field]}
            elif about.annotation == float | None:
                numbers[field] = next(iter(known.values()), None)
        return numbers


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

    def __init__(self, link: Link) -> None:
        self._link = link
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
            await asyncio.sleep(max(0.0, self._collected_s + INTERVAL_S - loop.time()))
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
