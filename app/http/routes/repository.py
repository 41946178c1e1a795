"""Models and devices while the service runs: Triton's model repository extension, and the release of cached memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter, Request
from pydantic import BaseModel

from app.errors import invalid_request
from app.link import Link
from app.protocols import documents, signatures
from app.protocols.parameters import switch

router, devices = APIRouter(tags=["repository"]), APIRouter(tags=["devices"])

_LARGEST_BYTES = 64 * 1024


class LoadedModel(BaseModel):
    """A model whose new weights are being served."""

    name: str
    weights: str


class UnloadedModel(BaseModel):
    """A model that no worker holds any more."""

    name: str


class Traffic(BaseModel):
    """The shares of a model's requests that its versions answer."""

    name: str
    shares: dict[str, float]


class IndexedModel(BaseModel):
    """A model of the repository; `state`: READY, LOADING or UNAVAILABLE."""

    name: str
    version: str
    state: str
    reason: str


class WorkerReleased(BaseModel):
    """Bytes that one worker released, by level: 1 collected, 2 caches. `returned_bytes`: of the device;
    `returned_host_bytes`: by which the worker's host memory fell meanwhile.
    """

    worker: str
    returned_bytes: Mapping[int, int]
    returned_host_bytes: Mapping[int, int]


class ReleaseStarted(BaseModel):
    """Memory that a device's workers released."""

    device: str
    workers: list[WorkerReleased]


@router.post("/v2/repository/index")
async def list_repository(request: Request) -> list[IndexedModel]:
    """List every model that can be loaded, with its state; `{"ready": true}`: only those that are ready."""
    ready = switch(await _document(request), "ready")
    return [IndexedModel(**each) for each in signatures.index(request.app.state.link, ready)]


@router.post("/v2/repository/models/{model}/load")
async def load_model(request: Request, model: str) -> LoadedModel:
    """Serve the present weights of the model's file; answer when every worker has been replaced. No request is lost."""
    signatures.check_parameters(_parameters(await _document(request)))
    link: Link = request.app.state.link
    served = link.find(model)
    await link.administration.load(served.model.name)
    request.scope["anychip"].weights_sha256 = served.model.weights_sha256
    return LoadedModel(name=model, weights=served.model.weights)


@router.post("/v2/repository/models/{model}/traffic")
async def set_traffic(request: Request, model: str) -> Traffic:
    """Let versions of a model answer these shares of its requests: `{"shares": {"1": 95, "2": 5}}`."""
    shares = (await _document(request)).get("shares")
    if not isinstance(shares, dict) or not all(type(each) in (int, float) for each in shares.values()):
        raise invalid_request('the body must be like {"shares": {"1": 95, "2": 5}}')
    link: Link = request.app.state.link
    link.find(model)
    link.administration.set_traffic(model, shares)
    request.scope["anychip"].subject = {"shares": ",".join(f"{version}:{each:g}" for version, each in shares.items())}
    return Traffic(name=model, shares=shares)


@router.post("/v2/repository/models/{model}/unload")
async def unload_model(request: Request, model: str) -> UnloadedModel:
    """Refuse new requests for the model, answer those in flight, and free its memory on every device."""
    signatures.check_parameters(_parameters(await _document(request)))
    link: Link = request.app.state.link
    await link.administration.unload(link.find(model).model.name)
    return UnloadedModel(name=model)


@devices.post("/v1/devices/{device}:release")
async def release_memory(request: Request, device: str) -> ReleaseStarted:
    """Release cached memory on every worker of the device; answer when all have."""
    link: Link = request.app.state.link
    returned = await link.administration.release(device)
    workers = [
        WorkerReleased(worker=worker, returned_bytes=each.device, returned_host_bytes=each.host)
        for worker, each in returned.items()
    ]
    return ReleaseStarted(device=device, workers=workers)


async def _document(request: Request) -> dict[str, Any]:
    """Read the body, an object or nothing. Raises INVALID_REQUEST."""
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > _LARGEST_BYTES:
            raise invalid_request(f"the body is larger than the {_LARGEST_BYTES} bytes that such a request may have")
    if not body.strip():
        return {}
    document = documents.loaded(body)
    if not isinstance(document, dict):
        raise invalid_request("the body must be a JSON object")
    return document


def _parameters(document: dict[str, Any]) -> dict[str, Any]:
    parameters = document.get("parameters") or {}
    if not isinstance(parameters, dict):
        raise invalid_request("the parameters must be an object")
    return parameters
