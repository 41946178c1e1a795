"""The API description, made from the routes without a service."""

from __future__ import annotations

import json

from fastapi import FastAPI

from app.compat import torchserve
from app.errors import ERRORS
from app.http.api_description import ADDRESS, ADMIN_ADDRESS, describe_api
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
            assert ADDRESS in operation["description"] or ADMIN_ADDRESS in operation["description"]
            error = operation["responses"]["default"]
            assert all(code in error["description"] for code in ERRORS)
    assert "422" not in document["paths"]["/v1/models/{model}:predict"]["post"]["responses"]
    json.dumps(document)
