"""Status of the service: models, devices, health, metrics."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Literal

from fastapi import APIRouter, HTTPException, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel

from app.access.rules import LIVE, READY
from app.core import ServedOn
from app.errors import ServiceError, invalid_request
from app.http.playground.page import PageFile
from app.link import Devices, Link
from models import Finds, Model, PixelModel
from models.contract.cascade import Cascade
from models.tasks.classify import Classify

router = APIRouter(tags=["status"])


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


class ModelReady(BaseModel):
    """Answer of a model that is ready."""

    name: str
    ready: bool


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
    return Models(
        models=[
            ModelStatus(
                name=served.model.name,
                architecture=served.model.architecture,
                task=served.model.task,
                finds=served.model.finds,
                weights=served.model.weights,
                weights_sha256=served.model.weights_sha256,
                classes=len(served.model.labels),
                scores=_scores(served.model),
                input_shape=served.model.input_shape,
                ready=ask.state(served.model.name)[0].is_ready,
                profile=ask.profile_of(served.model.name),
                served_on=ask.served_on(served.model.name),
            )
            for served in link.models.values()
        ]
        + [_cascade(link, cascade) for cascade in link.cascades.values()]
    )


def _scores(model: Model) -> Literal["softmax", "sigmoid"] | None:
    """Return how a classifier makes scores of its logits; None for other tasks."""
    adapter = model.adapter if isinstance(model, PixelModel) else None
    return adapter.scored_by if isinstance(adapter, Classify) else None


def _cascade(link: Link, cascade: Cascade) -> ModelStatus:
    first, *_, last = (link.models[name].model for name in cascade.models)
    states = [link.administration.state(each)[0] for each in link.parts(cascade.name)]
    return ModelStatus(
        name=cascade.name,
        architecture=" > ".join(cascade.models),
        task=cascade.task or first.task,
        finds=first.finds,
        weights=first.weights,
        weights_sha256=first.weights_sha256,
        classes=len(last.labels),
        scores=_scores(first),
        input_shape=first.input_shape,
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
async def get_labels(request: Request, model: str) -> ModelLabels:
    """Return a model's task and the labels of its classes; of several stages, the first one's labels."""
    link: Link = request.app.state.link
    first, cascade = link.find(model).model, link.cascades.get(model)
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
    """Answer at the first of these paths, and alike at those that load balancers usually ask."""
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
