"""`POST /v1/models/{model}:predict`: encoded images in, predictions out."""

from __future__ import annotations

from functools import partial
from typing import Any

import orjson
from fastapi import APIRouter, Request, Response

from app.config import Settings
from app.errors import invalid_request
from app.http.call import (
    AsgiRequest,
    Content,
    HttpCall,
    HttpRequest,
    as_json,
    as_large_json,
    as_response,
    read_images,
    read_query,
)
from app.ingress.budget import Lease
from app.ingress.cascade import predict_cascade
from app.ingress.ingress import Ingress, Run
from app.ingress.prediction import Answer
from app.ingress.prediction import predict as predict_images
from app.ingress.tiles import predict_tiled
from app.link import ServedModel, Terms
from app.protocols.options import PREDICT, VERSION
from app.protocols.parameters import DEFAULT_OPTIONS, deadline_s, pairs_of
from models.tasks.tiles import Tiling

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
    "parameters": [row.described() for row in PREDICT],
}


@router.post(ROUTE, openapi_extra=_DOCUMENTATION, response_class=Response)
async def predict(request: Request, model: str) -> Response:
    """Classify or detect in one image (raw bytes) or several (multipart/form-data, JSON)."""
    return as_response(await answer(request.app.state.ingress, AsgiRequest.of(request), model))


async def answer(ingress: Ingress, request: HttpRequest, model: str) -> Content:
    """Return the content of a good answer. Raises ServiceError, ClientLeftError."""
    answered = await ingress.answer(PredictCall(request, model))
    made_by = ingress.made_by(answered.computed_by)
    if not answered.is_large:
        return as_json({"model": model, "predictions": answered.predictions, **made_by})
    # No name can hold this text: its quotes would be escaped.
    before, key, after = orjson.dumps({"model": model, "predictions": [], **made_by}).partition(b'"predictions":[]')
    return await as_large_json(ingress, answered.predictions, before + key[:-2], after)


class PredictCall(HttpCall[Answer]):
    """Call with encoded images in one of the forms of app.http.call.

    `any_type`: a body of any type that is no form is an image, and other parameters and fields are ignored.
    """

    def __init__(self, request: HttpRequest, model: str, version: str = "", *, any_type: bool = False) -> None:
        query: bytes = request.scope["query_string"]
        if b"version=" in query:
            version = dict(pairs_of(query)).get(VERSION.name) or version
        super().__init__(request, model, version)
        self._any_type = any_type
        self._options = DEFAULT_OPTIONS
        self._tiling: Tiling | None = None

    def terms(self, settings: Settings) -> Terms:  # noqa: D102
        terms = super().terms(settings)
        query = self.request.scope["query_string"]
        if query:
            self._options, timeout_ms, self._tiling = read_query(query, any_name=self._any_type)
            if timeout_ms is not None:
                terms.deadline_s = deadline_s(self.context.started_s, timeout_ms / 1e3)
        return terms

    async def asked(  # noqa: D102
        self, ingress: Ingress, served: ServedModel, terms: Terms, lease: Lease
    ) -> Run[Answer]:
        images = await read_images(
            self.headers, self.body, ingress.link.settings.max_images, ingress.converter, lease, any_type=self._any_type
        )
        self.body = b""  # Once decoded, an image is not kept.
        if (cascade := ingress.link.cascades.get(self.model)) is not None:
            if self._tiling is not None and self._tiling.side:
                raise invalid_request("two stages do not look at tiles")
            return lambda: predict_cascade(ingress, cascade, served, images, terms, options=self._options)
        if (tiling := self._tiling) is not None and tiling.side:
            return lambda: predict_tiled(ingress, served, images, terms, options=self._options, tiling=tiling)
        return partial(predict_images, ingress, served, images, terms, options=self._options)
