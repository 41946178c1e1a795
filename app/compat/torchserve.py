"""TorchServe's routes, with answers in the shape of its `image_classifier` and `object_detector`. Errors are ours."""

from __future__ import annotations

import re
from typing import Any

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, ConfigDict

from app.http.call import AsgiRequest, Content, HttpRequest, as_json, as_large_json, as_response
from app.http.hot import NAME, HotRoute
from app.http.routes.predict import PredictCall
from app.ingress.ingress import Ingress
from app.link import Link
from models import Model

router = APIRouter(tags=["torchserve"])
ROUTE = "/predictions/{model}"

_IMAGE = {"schema": {"type": "string", "format": "binary"}}
_FORM = {"schema": {"type": "object", "properties": {"data": _IMAGE["schema"]}}}
_DOCUMENTATION: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {"image/jpeg": _IMAGE, "application/octet-stream": _IMAGE, "multipart/form-data": _FORM},
    },
}


class Ping(BaseModel):
    """Sign that every model has a worker."""

    status: str


class ListedModel(BaseModel):
    """A model, and the origin of its weights."""

    model_config = ConfigDict(protected_namespaces=())

    modelName: str  # noqa: N815 - TorchServe's name
    modelUrl: str  # noqa: N815


class ModelList(BaseModel):
    """List of every model."""

    models: list[ListedModel]


@router.get("/ping", responses={503: {"description": "Not healthy, with the reason"}})
async def ping(request: Request) -> Ping:
    """Answer 200 while every model has a worker and the service is not shutting down."""
    link: Link = request.app.state.link
    link.administration.check()
    return Ping(status="Healthy")


@router.get("/models")
async def list_names(request: Request) -> ModelList:
    """List the models."""
    link: Link = request.app.state.link
    return ModelList(
        models=[ListedModel(modelName=name, modelUrl=served.model.weights) for name, served in link.models.items()]
    )


@router.put(ROUTE, include_in_schema=False)
@router.put("/predictions/{model}/{version}", include_in_schema=False)
@router.post(ROUTE, openapi_extra=_DOCUMENTATION, response_class=Response)
@router.post("/predictions/{model}/{version}", openapi_extra=_DOCUMENTATION, response_class=Response)
async def predict_as_torchserve(request: Request, model: str, version: str = "") -> Response:
    """Return classes with probabilities, or detections, of one image; a list of these for several in one request."""
    return as_response(await answer(request.app.state.ingress, AsgiRequest.of(request), model, version))


async def answer(ingress: Ingress, request: HttpRequest, model: str, version: str = "") -> Content:
    """Return the content of a good answer. Raises ServiceError, ClientLeftError."""
    answered = await ingress.answer(PredictCall(request, model, version, any_type=True))
    shaped = [_shaped(ingress.link.find(model).model, each) for each in answered.predictions]
    if answered.is_large and len(shaped) > 1:
        return await as_large_json(ingress, shaped)
    return as_json(shaped[0] if len(shaped) == 1 else shaped)


HOT: HotRoute = (re.compile(rb"/predictions/%b(?:/%b)?" % (NAME, NAME)), ROUTE, answer)


def _shaped(model: Model, prediction: dict[str, Any]) -> Any:
    if model.finds == "classes":
        return {each["label"]: each["score"] for each in prediction["classes"]}
    if model.finds == "other":
        return prediction
    return [{each["label"]: list(each["box"].values()), "score": each["score"]} for each in prediction["detections"]]
