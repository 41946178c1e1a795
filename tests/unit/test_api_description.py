"""The API description, made from the routes without a service."""

from __future__ import annotations

import json

import httpx
from fastapi import FastAPI
from starlette.types import Receive, Scope, Send

from app.compat import torchserve
from app.errors import ERRORS
from app.http.api_description import ADDRESS, ADMIN_ADDRESS, describe_api
from app.http.docs_page import mount_docs
from app.http.edge import BIND
from app.http.routes import devices, infer, predict, repository, stats, status, v2


def test_every_route_has_an_example_and_the_error_form() -> None:
    app = FastAPI()
    for routes in (devices, infer, predict, repository, stats, status, torchserve, v2):
        app.include_router(routes.router)
    describe_api(app)
    document = app.openapi()
    assert len(document["paths"]) > 20
    for operations in document["paths"].values():
        for operation in operations.values():
            assert "curl" in operation["description"]
            assert len(operation["summary"].split()) > 1, "a sentence, and not the operation's name"
            assert operation["description"].startswith(operation["summary"])
            assert ADDRESS in operation["description"] or ADMIN_ADDRESS in operation["description"]
            error = operation["responses"]["default"]
            assert all(code in error["description"] for code in ERRORS)
    assert "422" not in document["paths"]["/v1/models/{model}:predict"]["post"]["responses"]
    json.dumps(document)


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
            described[bind] = set((await client.get("/openapi.json")).json()["paths"])
            assert "defaultModelsExpandDepth: 0" in (await client.get("/docs")).text
    administered = {f"/v2/repository/models/{{model}}/{action}" for action in ("load", "unload", "traffic")}
    assert described["admin"] - described["public"] == administered
    assert described["public"]
