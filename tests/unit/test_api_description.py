"""The API description, made from the routes without a service."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from starlette.types import Receive, Scope, Send

from app.access.rules import LIVE, READY, ROUTES
from app.compat import torchserve
from app.errors import ERRORS
from app.http.api_description import ADDRESS, ADMIN_ADDRESS, describe_api
from app.http.docs_page import mount_docs
from app.http.edge import BIND
from app.http.routes import devices, infer, predict, repository, stats, status, v2


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    app = FastAPI()
    for routes in (devices, infer, predict, repository, stats, status, torchserve, v2):
        app.include_router(routes.router)
    describe_api(app)
    return app.openapi()


def test_every_route_has_an_example_and_the_error_form(document: dict[str, Any]) -> None:
    assert len(document["paths"]) > 20
    for operations in document["paths"].values():
        for operation in operations.values():
            assert "curl" in operation["description"]
            assert len(operation["summary"].split()) > 1, "a sentence, and not the operation's name"
            assert operation["description"].startswith(operation["summary"])
            assert ADDRESS in operation["description"] or ADMIN_ADDRESS in operation["description"]
            error = operation["responses"]["default"]
            assert error["content"]["application/json"]
            assert all(code in error["description"] for code in ERRORS)
    assert "422" not in document["paths"]["/v1/models/{model}:predict"]["post"]["responses"]


def test_every_form_of_an_answer_is_described(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    assert {"PredictAnswer", "DetectedImage", "Box", "InferAnswer", "ErrorAnswer", "Snapshot", "Models"} <= set(schemas)
    assert "HTTPValidationError" not in schemas
    assert set(re.findall(r"#/components/schemas/(\w+)", json.dumps(document))) <= set(schemas)


def test_operations_have_short_names_and_say_where_a_key_belongs(document: dict[str, Any]) -> None:
    operations = [each for of_path in document["paths"].values() for each in of_path.values()]
    names = [each["operationId"] for each in operations]
    assert len(set(names)) == len(names)
    assert {"predict", "list_models", "is_live", "get_metadata_of_version", "predict_as_torchserve"} <= set(names)
    assert not [name for name in names if re.search("v[12]|_post|_get|__", name)]
    assert set(document["components"]["securitySchemes"]) == {"bearer", "apiKey"}
    for path, of_path in document["paths"].items():
        for method, operation in of_path.items():
            assert ("security" in operation) == (ROUTES[path][method.upper()] in ("infer", "admin")), path


@pytest.mark.parametrize(("first", "path"), [(paths[0], path) for paths in (LIVE, READY) for path in paths[1:]])
def test_a_usual_path_of_a_probe_is_described_in_a_sentence(document: dict[str, Any], first: str, path: str) -> None:
    operation, described = document["paths"][path]["get"], document["paths"][first]["get"]
    assert (operation["operationId"], operation["summary"]) == (path.removeprefix("/"), f"Answer as `{first}` does")
    assert operation["responses"] == described["responses"]


async def test_a_port_describes_what_it_answers() -> None:
    app = FastAPI(docs_url=None)
    app.include_router(repository.router)
    describe_api(app)
    mount_docs(app, administered=False)
    described = {}
    for bind in ("public", "admin"):

        async def bound(scope: Scope, receive: Receive, send: Send, bind: str = bind) -> None:
            await app({**scope, BIND: bind}, receive, send)

        async with httpx.AsyncClient(transport=httpx.ASGITransport(bound), base_url="http://127.0.0.1") as client:
            answer = (await client.get("/openapi.json")).json()
            assert answer["servers"] == [{"url": "/"}]
            described[bind] = set(answer["paths"])
            assert "defaultModelsExpandDepth: 0" in (await client.get("/docs")).text
    administered = {f"/v2/repository/models/{{model}}/{action}" for action in ("load", "unload", "traffic")}
    assert described["admin"] - described["public"] == administered
    assert described["public"]
