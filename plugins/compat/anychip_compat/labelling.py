"""X-AnyLabeling's remote server: this service draws first for people who label images. `--compat x-anylabeling`.

Its list of models has the path of ours, so one answer holds both. The program always sends thresholds: 0 means the
default. A request names its model within its JSON; until that is read it counts as one for the first model of images.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fastapi import APIRouter, Request, Response

from app.access.rules import Need
from app.errors import ServiceError, invalid_request
from app.http.call import AsgiRequest, HttpCall, as_json, as_response
from app.http.routes.status import list_models as our_models
from app.ingress.budget import Lease
from app.ingress.cascade import predict_cascade
from app.ingress.ingress import Ingress, Run
from app.ingress.prediction import Answer, predict
from app.link import Link, ServedModel, Terms
from app.protocols import documents
from app.protocols.parameters import DEFAULT_OPTIONS, number
from models import Options, PixelModel

router = APIRouter(tags=["x-anylabeling"], include_in_schema=False)
NEEDS: dict[str, dict[str, Need]] = {
    "/v1/predict": {"POST": "infer"},
    "/v1/models": {"GET": "infer"},
    "/v1/models/{model}/info": {"GET": "infer"},
    "/health": {"GET": "open"},
}

_LEAST_VISIBILITY = 0.5
_FULL = ("QUEUE_FULL", "DRAINING", "NOT_READY", "MODEL_LOADING", "DEADLINE_UNREACHABLE")


class LabellingCall(HttpCall[Answer]):
    """JSON of a model's name, an image and thresholds. `wanted`: the labels that are drawn, none means all."""

    wanted: frozenset[str] = frozenset()

    async def asked(self, ingress: Ingress, served: ServedModel, terms: Terms, lease: Lease) -> Run[Answer]:
        """Prepare the model that the JSON names. Raises INVALID_REQUEST, MODEL_NOT_FOUND."""
        packed = await ingress.converter.convert(documents.packed_with_image, 0, self.body)
        lease.take(len(packed))
        document, [image] = documents.unpack(packed)
        model, params = document.get("model"), document.get("params") or {}
        if not isinstance(model, str) or not isinstance(params, dict):
            raise invalid_request('the body must be {"model": "…", "image": "data:image/png;base64,…", "params": {}}')
        named = self.context.choose(model)
        given = {name: value for name, value in params.items() if value}
        options = Options(
            score_threshold=number(given, "conf_threshold", DEFAULT_OPTIONS.score_threshold, 0, 1),
            iou_threshold=number(given, "iou_threshold", DEFAULT_OPTIONS.iou_threshold, 0, 1),
        )
        wanted = params.get("filter_classes") or ()
        if not isinstance(wanted, list | tuple) or not all(isinstance(each, str) for each in wanted):
            raise invalid_request("filter_classes must be a list of labels")
        self.wanted = frozenset(wanted)
        if (cascade := ingress.link.cascades.get(model)) is not None:
            return lambda: predict_cascade(ingress, cascade, named, [image], terms, options=options)
        return lambda: predict(ingress, named, [image], terms, options=options)


@router.get("/health")
async def health() -> dict[str, Any]:
    """Report that the server answers."""
    return {"success": True, "data": {"status": "healthy"}}


@router.get("/v1/models")
async def list_models(request: Request) -> dict[str, Any]:
    """Return our list of models, with X-AnyLabeling's as `data`."""
    ours = await our_models(request)
    return {**ours.model_dump(), "success": True, "data": _described(request.app.state.link)}


@router.get("/v1/models/{model}/info")
async def info(request: Request, model: str) -> dict[str, Any]:
    """Describe one model, like the list."""
    described = _described(request.app.state.link)
    if model not in described:
        raise ServiceError("MODEL_NOT_FOUND", f"there is no model {model!r} of images here")
    return {"success": True, "data": described[model]}


@router.post("/v1/predict")
async def label(request: Request) -> Response:
    """Return the shapes of what is found."""
    ingress: Ingress = request.app.state.ingress
    try:
        first = next(iter(_described(ingress.link)), None)
        if first is None:
            raise invalid_request("no model here takes images")
        call = LabellingCall(AsgiRequest.of(request), first)
        answer = await ingress.answer(call)
    except ServiceError as error:
        response = as_response(as_json({"success": False, "error": {"code": error.code, "message": error.message}}))
        response.status_code = 503 if error.code in _FULL else 200
        return response
    [prediction] = answer.predictions
    shapes = [
        shape
        for number, found in enumerate(prediction.get("detections", ()))
        if not call.wanted or found["label"] in call.wanted
        for shape in _shapes(found, number)
    ]
    best = prediction.get("classes") or [{"label": ""}]
    data = {"shapes": shapes, "description": best[0]["label"], "replace": None}
    return as_response(as_json({"success": True, "data": data}))


def _described(link: Link) -> dict[str, Any]:
    widgets = [
        {"name": "button_run", "value": None},
        {"name": "edit_conf", "value": DEFAULT_OPTIONS.score_threshold},
        {"name": "edit_iou", "value": DEFAULT_OPTIONS.iou_threshold},
        {"name": "button_classes_filter", "value": None},
    ]
    about = {"widgets": widgets, "params": {}, "capabilities": {}, "batch_processing_mode": "default"}
    names = [name for name, served in link.models.items() if isinstance(served.model, PixelModel)]
    return {
        name: {"display_name": name, "classes": list(link.find(name).model.labels), **about}
        for name in (*names, *link.cascades)
    }


def _shapes(found: dict[str, Any], index: int) -> Iterator[dict[str, Any]]:
    """Yield the shapes of a detection: outlines, a turned box, or an upright box with its key points."""
    if found.get("segments"):
        for ring in found["segments"]:
            yield _shape(found, "polygon", [*ring, ring[0]])
        return
    if "corners" in found:
        yield {**_shape(found, "rotation", found["corners"]), "direction": found["obb"]["angle"]}
        return
    box = found["box"]
    corners = [(box["x1"], box["y1"]), (box["x2"], box["y1"]), (box["x2"], box["y2"]), (box["x1"], box["y2"])]
    group = index + 1 if "keypoints" in found else None
    yield {**_shape(found, "rectangle", corners), "group_id": group}
    for place, point in enumerate(found.get("keypoints", ())):
        if point["score"] >= _LEAST_VISIBILITY:
            shape = _shape({"label": str(place), "score": point["score"]}, "point", [(point["x"], point["y"])])
            yield {**shape, "group_id": group}


def _shape(found: dict[str, Any], kind: str, points: Any) -> dict[str, Any]:
    return {
        "label": found["label"],
        "shape_type": kind,
        "points": [list(point) for point in points],
        "score": found["score"],
        "attributes": {},
        "description": next((best["label"] for best in found.get("classes", ())), ""),
        "difficult": False,
        "direction": 0,
        "flags": {},
        "group_id": None,
        "kie_linking": [],
    }
