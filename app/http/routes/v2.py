"""The Open Inference Protocol over REST, except inference: metadata, readiness, and the requests of Triton's tools.

Owns: paths and answers' forms. Health is in app.http.routes.status, inference in app.http.routes.infer.
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict

from app.http.routes.status import ModelReady
from app.link import Link
from app.protocols import signatures, triton

router = APIRouter(tags=["inference"])


class ServerMetadata(BaseModel):
    """Name, version and extensions of the server."""

    name: str
    version: str
    extensions: list[str]


class TensorMetadata(BaseModel):
    """A tensor; -1: a dimension that may vary."""

    name: str
    datatype: str
    shape: list[int]


class ModelMetadata(BaseModel):
    """Inputs of a model (of images, one of them a request) and outputs; `parameters`: how it is served."""

    name: str
    versions: list[str]
    platform: str
    inputs: list[TensorMetadata]
    outputs: list[TensorMetadata]
    parameters: dict[str, Any]


class Statistics(BaseModel):
    """Triton's statistics."""

    model_config = ConfigDict(protected_namespaces=())

    model_stats: list[dict[str, Any]]


@router.get("/v2/", include_in_schema=False)
@router.get("/v2")
async def get_server() -> ServerMetadata:
    """Return the server's name, version and extensions."""
    return ServerMetadata(**signatures.server_metadata())


# Before the routes of models, as in Triton: its clients ask here for all of them.
@router.get("/v2/models/stats", include_in_schema=False)
@router.get("/v2/stats", include_in_schema=False)
async def all_statistics(request: Request) -> Statistics:
    """Return the statistics of every model."""
    return Statistics(model_stats=triton.statistics(request.app.state.link))


@router.get("/v2/models/{model}")
@router.get("/v2/models/{model}/versions/{version}")
async def get_metadata(request: Request, model: str, version: str = "") -> ModelMetadata:
    """Return a model's inputs and outputs."""
    link: Link = request.app.state.link
    return ModelMetadata.model_validate(signatures.metadata(link, model, version))


@router.get("/v2/models/{model}/ready", responses={503: {"description": "Not ready, with the reason"}})
@router.get("/v2/models/{model}/versions/{version}/ready", responses={503: {"description": "Not ready"}})
async def is_model_ready(request: Request, model: str, version: str = "") -> ModelReady:
    """Answer 200 while the model has a worker and the service is not shutting down."""
    link: Link = request.app.state.link
    link.find(model, version)
    link.administration.check(*link.parts(model))
    return ModelReady(name=model, ready=True)


@router.get("/v2/models/{model}/config")
@router.get("/v2/models/{model}/versions/{version}/config")
async def get_configuration(request: Request, model: str, version: str = "") -> dict[str, Any]:
    """Return a model's configuration in Triton's terms."""
    link: Link = request.app.state.link
    return triton.configuration(link, model, version)


@router.get("/v2/models/{model}/stats")
@router.get("/v2/models/{model}/versions/{version}/stats")
async def get_statistics(request: Request, model: str, version: str = "") -> Statistics:
    """Return requests, images, batches and time by stage since the start, as Triton counts them."""
    return Statistics(model_stats=triton.statistics(request.app.state.link, model, version))
