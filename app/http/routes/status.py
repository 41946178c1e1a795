"""What is served, on what, and whether it is ready: models, devices, health, metrics."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, HTTPException, Request, Response
from pydantic import BaseModel

from app.errors import ServiceError, invalid_request
from app.serving.service import Service
from app.serving.snapshot import Snapshot, snapshot
from app.serving.stages import Stages

router = APIRouter(tags=["status"])


class DecodedBy(BaseModel):
    """Who decodes JPEG files: the `host` or the `device`. `refusal`: why the device does not, where it was asked to;
    `errors`: of answers to what it decodes against those to what the host decodes.
    """

    by: str
    refusal: str
    errors: dict[str, float]


class ServedOn(BaseModel):
    """How a device serves a model. `staged`: another engine or precision is made ready meanwhile, and takes over."""

    device: str
    engine: str
    precision: str
    staged: bool
    batch_sizes: list[int]
    refusals: dict[str, str]
    errors: dict[str, float]
    operators: dict[str, str]
    decoding: DecodedBy


class ModelStatus(BaseModel):
    """A model of the service."""

    name: str
    architecture: str
    task: str
    weights: str
    weights_sha256: str
    classes: int
    input_shape: tuple[int, ...]
    ready: bool
    profile: str
    served_on: list[ServedOn]


class Models(BaseModel):
    """Every model of the service."""

    models: list[ModelStatus]


class DeviceStatus(BaseModel):
    """A device the service uses."""

    device: str
    name: str
    vendor: str
    simulated: bool
    ready: bool


class Devices(BaseModel):
    """Devices in use, and why other vendors were not chosen."""

    devices: list[DeviceStatus]
    refusals: dict[str, str]


class ModelReady(BaseModel):
    """A model that answers."""

    name: str
    ready: bool


class Live(BaseModel):
    """The event loop answers."""

    live: bool


class ReadyBody(BaseModel):
    """Every model has a worker."""

    ready: bool


@router.get("/v1/models")
async def models(request: Request) -> Models:
    """What is served, on what, by which engine."""
    service: Service = request.app.state.service
    return Models(
        models=[
            ModelStatus(
                name=served.model.name,
                architecture=served.model.architecture,
                task=served.model.task,
                weights=served.model.weights,
                weights_sha256=served.model.weights_sha256,
                classes=len(served.model.labels),
                input_shape=served.model.input_shape,
                ready=service.dispatcher.readiness.is_ready(served.model.name),
                profile=service.profile_of(served.model.name),
                served_on=[
                    ServedOn(
                        device=device,
                        engine=loaded.report.engine,
                        precision=loaded.report.precision,
                        staged=loaded.report.staged,
                        batch_sizes=list(loaded.latency_s),
                        refusals=dict(loaded.report.refusals),
                        errors=dict(loaded.report.measures),
                        operators=dict(loaded.report.operators),
                        decoding=DecodedBy(
                            by=loaded.decoding.by,
                            refusal=loaded.decoding.refusal,
                            errors=loaded.decoding.errors,
                        ),
                    )
                    for device, loaded in service.dispatcher.loaded(served)
                ],
            )
            for served in service.models.values()
        ]
        + [_staged(service, stages) for stages in service.stages.values()]
    )


def _staged(service: Service, stages: Stages) -> ModelStatus:
    first, second = service.models[stages.first].model, service.models[stages.second].model
    is_ready = service.dispatcher.readiness.is_ready
    return ModelStatus(
        name=stages.name,
        architecture=f"{first.name} > {second.name}",
        task=first.task,
        weights=first.weights,
        weights_sha256=first.weights_sha256,
        classes=len(second.labels),
        input_shape=first.input_shape,
        ready=is_ready(first.name) and is_ready(second.name),
        profile="",
        served_on=[],
    )


@router.get("/v1/models/{model}", responses={503: {"description": "Not ready, with the reason"}})
async def model(request: Request, model: str) -> ModelReady:
    """KServe's v1 form of a model's readiness."""
    if model.endswith(":predict"):  # That path is POST's alone.
        raise HTTPException(405, headers={"Allow": "POST"})
    service: Service = request.app.state.service
    for served in service.parts(model):
        service.readiness.check(served)
    return ModelReady(name=model, ready=True)


@router.get("/v1/devices")
async def devices(request: Request) -> Devices:
    """The devices in use, and why other vendors were not chosen."""
    service: Service = request.app.state.service
    ready = {worker.device: worker.ready for worker in service.dispatcher.workers() if worker.ready}
    return Devices(
        devices=[
            DeviceStatus(
                device=device,
                name=ready[device].device_name if device in ready else "",
                vendor=service.choice.vendor,
                simulated=service.choice.simulated,
                ready=device in ready,
            )
            for device in service.choice.devices
        ],
        refusals=dict(service.choice.refusals),
    )


@router.get("/v2/health/live")
async def live() -> Live:
    """200 while the process answers at all."""
    return Live(live=True)


@router.get("/v2/health/ready", responses={503: {"description": "Not ready, with the reason"}})
async def ready(request: Request) -> ReadyBody:
    """200 while every model has a worker and the service is not shutting down."""
    service: Service = request.app.state.service
    service.readiness.check()
    return ReadyBody(ready=True)


def _counting(request: Request) -> Service:
    service: Service = request.app.state.service
    if not service.metrics.enabled:
        raise ServiceError("NOT_FOUND", "nothing is counted here: the service was started with --metrics false")
    return service


# Not a coroutine: rendering takes milliseconds and belongs in a thread, off the event loop. The same below.
@router.get("/metrics", response_class=Response)
def metrics(request: Request) -> Any:
    """Prometheus exposition; OpenMetrics, with the traces of some measurements, where that is asked for."""
    service = _counting(request)
    try:
        content, content_type = service.metrics.render(request.headers.get("accept", ""))
    except ValueError:
        raise invalid_request("the Accept header names a version of OpenMetrics that is no version") from None
    return Response(content, headers={"content-type": content_type})


@router.get("/v1/stats", responses={404: {"description": "Nothing is counted here"}})
def stats(request: Request) -> Snapshot:
    """The numbers of /metrics in one small JSON, counted since the start; `anychip top` shows them."""
    return snapshot(_counting(request))
