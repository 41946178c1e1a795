"""`/openapi.json` and `/docs`: the API as it is described, to read and to try in a browser without internet.

Answers are written straight to JSON, so tests hold real ones against these models. Of fastapi-offline only Swagger UI
is used.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from importlib.resources import as_file, files
from typing import Any

import orjson
from fastapi import FastAPI, Request
from fastapi.openapi.utils import get_openapi
from fastapi.responses import HTMLResponse, Response
from fastapi.staticfiles import StaticFiles
from pydantic import BaseModel, ConfigDict, Field

from app.access.rules import ROUTES
from app.errors import ERRORS
from app.http.edge import BIND


class Schema(BaseModel):
    """A part of an answer. A field that is not named here is a mistake, in the answer or here."""

    model_config = ConfigDict(extra="forbid")


class Box(Schema):
    """A box in pixels of the image as displayed: x1, y1 is its upper left corner, x2, y2 its lower right one."""

    x1: float
    y1: float
    x2: float
    y2: float


class KeyPoint(Schema):
    """A key point in pixels of the image; the score is the network's confidence that it is visible."""

    x: float
    y: float
    score: float


class TurnedBox(Schema):
    """A turned box: its centre and sides in pixels of the image, and its angle in radians, clockwise."""

    cx: float
    cy: float
    w: float
    h: float
    angle: float


class Mask(Schema):
    """A mask, as asked for by `masks`: run lengths of the whole image (COCO), or a PNG that begins at (x, y)."""

    size: list[int] = Field(description="Height and width of the image")
    counts: str | None = Field(None, description="Run lengths, column by column, as pycocotools writes them")
    png: str | None = Field(None, description="A PNG of 0 and 255, in base64")
    x: int | None = None
    y: int | None = None


class ImageClass(Schema):
    """One of the best `top_k` classes for the image."""

    label: str
    class_id: int = Field(ge=0)
    score: float = Field(ge=0, le=1)


class Detection(ImageClass):
    """An object that was found. The fields after `box` depend on the model's task."""

    box: Box
    segments: list[list[list[float]]] | None = Field(None, description="Outlines of its mask: rings of [x, y]")
    mask: Mask | None = Field(None, description="Its mask in another form; null where the image has too many pixels")
    keypoints: list[KeyPoint] | None = None
    obb: TurnedBox | None = None
    classes: list[ImageClass] | None = Field(None, description="Of two stages: what the second says of this object")
    corners: list[list[float]] | None = Field(None, description="Four corners [x, y] of the turned box, in order")


class _Image(Schema):
    width: int
    height: int


class DetectedImage(_Image):
    """The objects found in an image, best score first. Width and height are the image's, as displayed."""

    detections: list[Detection]


class ClassifiedImage(_Image):
    """The classes of an image, best score first. Width and height are the image's, as displayed."""

    classes: list[ImageClass]


class EmbeddedImage(_Image):
    """The vector of an image: numbers, or base64 of little-endian float32, as asked for by `encoding`."""

    embedding: list[float] | str


class Area(Schema):
    """The pixels of a class, and their share of the image."""

    label: str
    class_id: int = Field(ge=0)
    area: int = Field(ge=0)
    share: float = Field(ge=0, le=1)
    mask: Mask | None = Field(None, description="With `masks=rle`: run lengths of the map")


class ClassMap(Schema):
    """The class of each pixel: a PNG of 8 bits, or of 16 if there are more than 256 classes."""

    size: list[int] = Field(description="Height and width of the map")
    png: str


class SegmentedImage(_Image):
    """The classes of an image's pixels, the largest area first."""

    areas: list[Area]
    class_map: ClassMap | None = Field(None, description="Not with `masks=rle` or `none`")


class DepthMap(Schema):
    """The depth of each pixel: `min` + level / 65535 * (`max` - `min`), or the network's own float32."""

    size: list[int] = Field(description="Height and width of the map")
    min: float
    max: float
    png: str | None = Field(None, description="16 bits, in base64")
    float32: str | None = Field(None, description="With `encoding=base64`: little-endian, row by row")


class DepthImage(_Image):
    """The depth of an image."""

    depth: DepthMap


class RegressedImage(_Image):
    """The numbers that the network gives for an image, by name."""

    values: dict[str, float]


class PredictAnswer(Schema):
    """The answer to `:predict`: one entry for each image, in the order of the request, and what computed it."""

    model: str
    predictions: list[DetectedImage | ClassifiedImage | EmbeddedImage | SegmentedImage | DepthImage | RegressedImage]
    weights: str = Field(description="Where the weights come from: official, sample, random, or a file's name")
    device: str
    engine: str
    precision: str
    simulated: bool = Field(False, description="Present and true where the CPU stands in for an accelerator")


class ErrorAnswer(Schema):
    """The body of every error, on every route."""

    error: str = Field(description="One plain sentence for people; it may change")
    code: str = Field(description="For programs; it does not change")
    request_id: str = Field(description="The log has the detail under it")


class JsonOutput(Schema):
    """A tensor of an Open Inference answer. As binary data its bytes follow the JSON, and `data` is absent."""

    name: str
    datatype: str
    shape: list[int]
    data: list[float | int | str | bool] | None = None
    parameters: dict[str, int | float | str | bool] | None = None


class InferAnswer(Schema):
    """The answer to `/infer`, as JSON."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    model_name: str
    model_version: str
    id: str | None = None
    parameters: dict[str, int | float | str | bool]
    outputs: list[JsonOutput]


_SECURITY = {
    "bearer": {"type": "http", "scheme": "bearer", "description": "One of the keys of --api-keys-file."},
    "apiKey": {"type": "apiKey", "in": "header", "name": "X-Api-Key", "description": "The same key."},
}
_WITH_KEY: list[dict[str, list[str]]] = [{name: []} for name in _SECURITY]

_ANSWERS: dict[tuple[str, str], type[BaseModel]] = {
    ("post", "/v1/models/{model}:predict"): PredictAnswer,
    ("post", "/v2/models/{model}/infer"): InferAnswer,
    ("post", "/v2/models/{model}/versions/{version}/infer"): InferAnswer,
}
"""Answers of routes that write their JSON by hand, for speed; FastAPI describes the answers of all others."""
_SENTENCE_END = re.compile(r"\.(?:\s|$)|;|:\s| \(|\n")
"""End of the part of a description that says in a line what a route does."""

_ASSETS = "/docs/assets"

# `validatorUrl` would send the address of the API description to a public validator, and show its badge.
_SCRIPT = """
SwaggerUIBundle({
  url: %s, dom_id: "#swagger-ui", deepLinking: true, displayRequestDuration: true, validatorUrl: null,
  presets: [SwaggerUIBundle.presets.apis], layout: "BaseLayout", defaultModelsExpandDepth: 0,
});
"""

_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>%(title)s: API</title>
<link rel="icon" href="data:,">
<link rel="stylesheet" href="%(assets)s/swagger-ui.css">
</head>
<body>
<div id="swagger-ui"></div>
<noscript>The API description is at <a href="%(openapi)s">%(openapi)s</a>.</noscript>
<script src="%(assets)s/swagger-ui-bundle.js"></script>
<script>%(script)s</script>
</body>
</html>
"""


def describe_api(app: FastAPI) -> None:
    """Make `app.openapi()` return the whole description; it is made once, at the first call."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _described(app)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's own way of extending the description.


def _described(app: FastAPI) -> dict[str, Any]:
    document = get_openapi(title=app.title, version=app.version, summary=app.summary, routes=app.routes)
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    for model in (PredictAnswer, InferAnswer, ErrorAnswer):
        schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
        schemas.update(schema.pop("$defs", {}))
        schemas[model.__name__] = schema
    errors = {
        "description": "An error:\n\n"
        + "\n".join(f"- {kind.status} `{code}`: {kind.meaning}" for code, kind in ERRORS.items()),
        "content": _json_of(ErrorAnswer),
    }
    document["components"]["securitySchemes"] = _SECURITY
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            name = _name_of(method, path, operation["operationId"])
            if ROUTES.get(path, {}).get(method.upper(), "infer") in ("infer", "admin"):
                operation["security"] = _WITH_KEY
            operation.update(operationId=name, summary=_SENTENCE_END.split(operation.get("description", ""))[0])
            answer = _ANSWERS.get((method, path))
            if answer is not None:
                good = operation["responses"].setdefault("200", {})
                good["description"] = (answer.__doc__ or "").strip()
                good.setdefault("content", {}).update(_json_of(answer))
            # FastAPI's own form of a validation error is never answered here.
            operation["responses"].pop("422", None)
            operation["responses"]["default"] = errors
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    return document


def _name_of(method: str, path: str, given: str) -> str:
    """Return the name of an operation: its route's, without the path and the method that FastAPI has `given` it."""
    name = given.removesuffix(re.sub(r"\W", "_", path) + f"_{method}")
    return name + ("_of_version" if "{version}" in path else "")


def _json_of(model: type[BaseModel]) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{model.__name__}"}}}


def mount_docs(app: FastAPI, *, administered: bool = True) -> None:
    """Add `GET /docs` to an application made with `FastAPI(docs_url=None)`, and each port's own description.

    `administered`: the public port also answers the administrators' routes. The page reads `app.openapi_url`, below the
    `root_path` a proxy may have set.
    """
    openapi_url = app.openapi_url
    assert openapi_url is not None
    app.router.routes[:] = [route for route in app.routes if getattr(route, "path", "") != openapi_url]

    @app.get(openapi_url, include_in_schema=False)
    async def description(request: Request) -> Response:
        document, root_path = app.openapi(), request.scope.get("root_path", "").rstrip("/")
        document = document | {"servers": [{"url": root_path or "/"}]}
        if request.scope.get(BIND) != "admin" and not administered:
            paths = document["paths"].items()  # Without those that only the administration's own port answers.
            document |= {"paths": {path: each for path, each in paths if "admin" not in ROUTES.get(path, {}).values()}}
        return Response(orjson.dumps(document), media_type="application/json")

    @app.get("/docs", include_in_schema=False)
    async def docs(request: Request) -> HTMLResponse:
        root_path = request.scope.get("root_path", "").rstrip("/")
        # In a script element "</" ends the script, even inside a string of JavaScript.
        script = _SCRIPT % json.dumps(root_path + openapi_url).replace("</", "<\\/")
        page = _PAGE % {
            "title": html.escape(app.title),
            "assets": html.escape(root_path + _ASSETS),
            "openapi": html.escape(root_path + openapi_url),
            "script": script,
        }
        headers = {
            "Content-Security-Policy": _policy(script),
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
            "X-Frame-Options": "DENY",
        }
        return HTMLResponse(page, headers=headers)

    with as_file(files("fastapi_offline") / "static") as assets:
        app.mount(_ASSETS, StaticFiles(directory=assets), name="docs-assets")


def _policy(script: str) -> str:
    """Allow only this host, and our inline script alone. Swagger UI sets styles inline and draws with data: images."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return (
        "default-src 'none'; connect-src 'self'; img-src 'self' data: blob:; style-src 'self' 'unsafe-inline'; "
        f"script-src 'self' 'sha256-{digest}'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
