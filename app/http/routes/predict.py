"""`POST /v1/models/{model}:predict`: encoded images in, predictions out."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import orjson
from fastapi import APIRouter, Request, Response
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope

from app.errors import ServiceError
from app.http.body import BodyBudget, header_number, read_body, read_images, read_query
from app.http.interrupt import unless_disconnected
from app.protocols.context import RequestContext
from app.scheduling.served_model import ServedModel
from app.serving.service import Answer, Service
from app.serving.service import Request as Ask

router = APIRouter(tags=["predict"])
ROUTE = "/v1/models/{model}:predict"

_IMAGE = {"schema": {"type": "string", "format": "binary"}}
_INSTANCES = {
    "type": "object",
    "required": ["instances"],
    "properties": {
        "instances": {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "required": ["b64"],
                "properties": {"b64": {"type": "string", "contentEncoding": "base64"}},
            },
        }
    },
}
_FILES = {"type": "object", "properties": {"file": {"type": "array", "items": _IMAGE["schema"]}}}


def _parameter(name: str, place: str, kind: str, text: str, **limits: Any) -> dict[str, Any]:
    return {"name": name, "in": place, "description": text, "schema": {"type": kind, **limits}}


_DOCUMENTATION: dict[str, Any] = {
    # The body is read by hand (raw bytes are the fast path), so the description is, too.
    "requestBody": {
        "required": True,
        "content": {
            "image/jpeg": _IMAGE,
            "image/png": _IMAGE,
            "image/webp": _IMAGE,
            "application/octet-stream": _IMAGE,
            "multipart/form-data": {"schema": _FILES},
            "application/json": {"schema": _INSTANCES},
        },
    },
    "parameters": [
        _parameter("top_k", "query", "integer", "Classes to answer with", minimum=1, default=5),
        _parameter("score_threshold", "query", "number", "Least score of a box", minimum=0, maximum=1, default=0.25),
        _parameter(
            "iou_threshold", "query", "number", "Overlap of boxes of a class", minimum=0, maximum=1, default=0.7
        ),
        _parameter("max_detections", "query", "integer", "Boxes to answer with", minimum=1, default=300),
        _parameter("timeout_ms", "query", "number", "Deadline in milliseconds", exclusiveMinimum=0),
        _parameter("X-Timeout-Ms", "header", "number", "The same, as a header", exclusiveMinimum=0),
        _parameter("X-Priority", "header", "integer", "0 is normal, higher goes first", default=0),
    ],
}


@router.post(ROUTE, openapi_extra=_DOCUMENTATION, response_class=Response)
async def predict(request: Request, model: str) -> Response:
    """Classify or detect in one image (raw bytes) or several (multipart/form-data, JSON)."""
    state = request.app.state
    body = await answer(state.service, state.bodies, request.scope, request.receive, model)
    return Response(body, media_type="application/json")


async def answer(service: Service, bodies: BodyBudget, scope: Scope, receive: Receive, model: str) -> bytes:
    """The JSON that answers a request for `model`. Raises ServiceError, starlette's ClientDisconnect."""
    answered = await predictions(service, bodies, scope, receive, model)
    return orjson.dumps({"model": model, "predictions": answered.predictions, **service.made_by(answered)})


async def predictions(
    service: Service, bodies: BodyBudget, scope: Scope, receive: Receive, model: str, *, any_type: bool = False
) -> Answer:
    """What was computed for a request. `any_type`: a body of any type that is no form is an image.

    Raises ServiceError, starlette's ClientDisconnect.
    """
    context: RequestContext = scope["anychip"]
    served = service.find(model)
    context.model = model
    service.refuse_if_stopping()
    headers = dict(scope["headers"])
    options, timeout_ms = read_query(scope["query_string"])
    if timeout_ms is None:
        timeout_ms = header_number(headers, "X-Timeout-Ms", service.settings.timeout_ms, 1e-3, 1e9)
    priority = int(header_number(headers, "X-Priority", 0, -100, 100))
    ask = Ask(
        options,
        context.started_s + timeout_ms / 1e3,
        priority,
        context.timings,
        trace=context.trace,
        exemplar=context.exemplar,
    )
    service.admit(served, ask.deadline_s, priority)
    with counted(served):
        body = await read_body(receive, headers, service.settings.max_body_bytes, bodies, ask.deadline_s)
    served.metrics.stage_seconds["upload"].observe(time.monotonic() - context.started_s, context.exemplar)
    try:
        images = await read_images(headers, body, service.settings.max_images, any_type=any_type)
        return await unless_disconnected(receive, service.predict(served, images, ask), ask.abandon)
    finally:
        bodies.give(len(body))


@contextmanager
def counted(served: ServedModel) -> Iterator[None]:
    """Count an upload that does not come."""
    try:
        yield
    except ClientDisconnect:
        served.metrics.cancelled["upload"].inc()
        raise
    except ServiceError as error:
        if error.code == "DEADLINE_EXCEEDED":
            served.metrics.expired["upload"].inc()
        elif error.code == "QUEUE_FULL":
            served.metrics.rejected["buffer_full"].inc()
        raise
