"""Content of `/openapi.json` and `/docs` beyond the routes: answers' schemas, errors, and an example a route.

Owns: the examples, which work as they are printed against `anychip demo` from a clone of the repository; a test runs
every one of them. Must not change what a route does.
"""

from __future__ import annotations

import re
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

from app.access.rules import ROUTES
from app.errors import ERRORS
from app.http.schemas import ErrorAnswer, InferAnswer, PredictAnswer

ADDRESS = "http://127.0.0.1:8000"
"""Address of `anychip demo`."""
ADMIN_ADDRESS = "http://127.0.0.1:8002"
"""Address of its administration."""

_IMAGES = "models/sample/images"
_JPEG = f"-H 'Content-Type: image/jpeg' --data-binary @{_IMAGES}"
_VALUES = {"{model}": "yolov8n", "{version}": "1", "{device}": "cpu:0"}

_PREDICTIONS = f"curl {_JPEG}/classify_heart.jpg {ADDRESS}/predictions/resnet50"
_INFER = f"""curl -H 'Inference-Header-Content-Length: 0' --data-binary @{_IMAGES}/detect_1.jpg \\
     {ADDRESS}/v2/models/yolov8n/infer --output answer.bin"""

EXAMPLES: dict[tuple[str, str], str] = {
    ("post", "/v1/models/{model}:predict"): f"""curl {_JPEG}/detect_1.jpg \\
     '{ADDRESS}/v1/models/yolov8n:predict?score_threshold=0.4'""",
    ("post", "/v2/models/{model}/infer"): _INFER,
    ("post", "/v2/models/{model}/versions/{version}/infer"): _INFER.replace(
        "yolov8n/infer", "yolov8n/versions/1/infer"
    ),
    ("post", "/predictions/{model}"): _PREDICTIONS,
    ("post", "/predictions/{model}/{version}"): f"{_PREDICTIONS}/1",
    ("post", "/v2/repository/models/{model}/traffic"): (
        f"""curl -d '{{"shares": {{"1": 95, "2": 5}}}}' {ADMIN_ADDRESS}/v2/repository/models/yolov8n/traffic"""
    ),
    ("get", "/v1/stats/stream"): f"curl --silent --no-buffer {ADDRESS}/v1/stats/stream | head -n 4",
}
"""Commands by method and path. A route that is not here needs nothing but its address."""

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


def describe_api(app: FastAPI) -> None:
    """Make `app.openapi()` return the whole description; it is made once, at the first call."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _described(app)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's own way of extending the description.


def example(method: str, path: str) -> str:
    """Return the command that calls a route."""
    known = EXAMPLES.get((method, path))
    if known is not None:
        return known
    address = ADMIN_ADDRESS if ROUTES.get(path, {}).get(method.upper()) == "admin" else ADDRESS
    for name, value in _VALUES.items():
        path = path.replace(name, value)
    request = "" if method == "get" else f"-X {method.upper()} "
    return f"curl {request}{address}{path}"


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
            text = operation.get("description", "").rstrip()
            operation.update(operationId=name, summary=_SENTENCE_END.split(text)[0])
            operation["description"] = f"{text}\n\n```\n{example(method, path)}\n```"
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


_SENTENCE_END = re.compile(r"\.(?:\s|$)|;|:\s| \(|\n")
"""End of the part of a description that says in a line what a route does."""


def _name_of(method: str, path: str, given: str) -> str:
    """Return the name of an operation: its route's, without the path and the method that FastAPI has `given` it."""
    name = given.removesuffix(re.sub(r"\W", "_", path) + f"_{method}")
    return name + ("_of_version" if "{version}" in path else "")


def _json_of(model: type[BaseModel]) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{model.__name__}"}}}
