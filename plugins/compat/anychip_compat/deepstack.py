"""Routes of DeepStack and CodeProject.AI for cameras' software. `--compat deepstack`.

The first detector of `--models` answers `detection`, the first classifier `scene`, and `custom/NAME` is the model NAME.
Boxes come by descending score and at most 20: Frigate has room for 20, and stops at the first that it does not want.
"""

from __future__ import annotations

import re
from typing import Any

import orjson
from fastapi import APIRouter, Request, Response

from app import clock
from app.access.rules import Need
from app.config import Settings
from app.errors import ServiceError, invalid_request
from app.http.call import AsgiRequest, as_json, as_response, read_form
from app.http.routes.predict import PredictCall
from app.ingress.budget import Lease
from app.ingress.ingress import Ingress, Run
from app.ingress.prediction import Answer, predict
from app.link import Link, ServedModel, Terms
from app.protocols import signatures
from app.protocols.parameters import number
from models import Finds, Options, PixelModel

router = APIRouter(tags=["deepstack"], include_in_schema=False)
NEEDS: dict[str, dict[str, Need]] = {
    "/v1/vision/detection": {"POST": "infer"},
    "/v1/vision/scene": {"POST": "infer"},
    "/v1/vision/custom/list": {"POST": "infer"},
    "/v1/vision/listmodels": {"POST": "infer"},
    "/v1/vision/custom/{model}": {"POST": "infer"},
    "/v1/status/ping": {"GET": "open"},
    "/v1/server/status/ping": {"GET": "open"},
    "/v1/status/version": {"GET": "open"},
    "/v1/server/status/version": {"GET": "open"},
}

_MOST = 20
_LEAST_CONFIDENCE = 0.4


class DeepStackCall(PredictCall):
    """Form with a file `image` and a field `min_confidence`."""

    def terms(self, settings: Settings) -> Terms:
        """Read the terms from the headers only; a query means nothing here."""
        return super(PredictCall, self).terms(settings)

    async def asked(self, ingress: Ingress, served: ServedModel, terms: Terms, lease: Lease) -> Run[Answer]:
        """Take the file called `image`, else the first one. Raises INVALID_REQUEST."""
        fields, files = await read_form(self.headers, self.body)
        image = files.get("image") or next(iter(files.values()), None)
        if not image:
            raise invalid_request("the form has no file called image")
        confidence = number(fields, "min_confidence", _LEAST_CONFIDENCE, 0, 1)
        options = Options(score_threshold=confidence, max_detections=_MOST, top_k=1, masks="none")
        return lambda: predict(ingress, served, [image], terms, options=options)


@router.get("/v1/status/ping")
@router.get("/v1/server/status/ping")
@router.get("/v1/status/version")
@router.get("/v1/server/status/version")
async def status() -> dict[str, Any]:
    """Report that the server answers, and its version, in CodeProject.AI's form."""
    version = signatures.server_metadata()["version"]
    major, minor, patch, *_ = (*re.findall(r"\d+", version), "0", "0", "0")
    numbers = {"major": int(major), "minor": int(minor), "patch": int(patch)}
    return {"success": True, "message": version, "version": numbers}


@router.post("/v1/vision/detection")
async def detection(request: Request) -> Response:
    """Find boxes with the first model that finds objects."""
    return await _answered(request, _first(request, "objects"))


@router.post("/v1/vision/scene")
async def scene(request: Request) -> Response:
    """Return the best class of the first classifier."""
    return await _answered(request, _first(request, "classes"))


@router.post("/v1/vision/custom/list")
@router.post("/v1/vision/listmodels")
async def list_models(request: Request) -> dict[str, Any]:
    """List the models that `custom` takes."""
    link: Link = request.app.state.link
    names = [name for name, served in link.models.items() if isinstance(served.model, PixelModel)]
    return {"success": True, "models": names}


@router.post("/v1/vision/custom/{model}")
async def custom(request: Request, model: str) -> Response:
    """Find boxes, or the best class, with the named model."""
    return await _answered(request, model)


def _first(request: Request, finds: Finds) -> str:
    link: Link = request.app.state.link
    return next((name for name, served in link.models.items() if served.model.finds == finds), "")


async def _answered(request: Request, model: str) -> Response:
    ingress: Ingress = request.app.state.ingress
    started_s = clock.monotonic()
    try:
        if not model:
            raise ServiceError("MODEL_NOT_FOUND", "no model of this service does that")
        answer = await ingress.answer(DeepStackCall(AsgiRequest.of(request), model))
    except ServiceError as error:
        return _refused(error)
    taken_ms = round((clock.monotonic() - started_s) * 1e3)
    [prediction] = answer.predictions
    if not prediction.keys() & {"classes", "detections"}:
        return _refused(invalid_request(f"{model} finds no objects and no classes"))
    named = {"success": True, "code": 200, "duration": 0, "moduleId": model, "moduleName": model}
    times = {"inferenceMs": taken_ms, "processMs": taken_ms, "analysisRoundTripMs": taken_ms}
    about = {**named, **times, "executionProvider": answer.computed_by.device, "command": "detect"}
    if "classes" in prediction:
        best = prediction["classes"][0]
        return as_response(as_json({**about, "label": best["label"], "confidence": best["score"]}))
    found = [_shaped(each) for each in prediction["detections"]]
    message = f"Found {len(found)} objects" if found else "No objects found"
    return as_response(as_json({**about, "predictions": found, "count": len(found), "message": message}))


def _refused(error: ServiceError) -> Response:
    status = 400 if error.status < 500 else 500
    body = orjson.dumps({"success": False, "error": f"{error.message} ({error.code})", "duration": 0})
    return Response(body, status, media_type="application/json")


def _shaped(found: dict[str, Any]) -> dict[str, Any]:
    box = found["box"]
    places = {f"{axis}_{end}": round(box[f"{axis}{1 + (end == 'max')}"]) for axis in "xy" for end in ("min", "max")}
    return {"label": found["label"], "confidence": found["score"], **places}
