"""`GET /docs`: the API, to read and to try, in a browser without internet.

Owns: the page, its files and its Content-Security-Policy. Must not load anything from another host; the bytes of
Swagger UI come with the package fastapi-offline; nothing else of it is used.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from importlib.resources import as_file, files

import orjson
from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, Response
from fastapi.staticfiles import StaticFiles

from app.access.rules import ROUTES
from app.http.edge import BIND

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
