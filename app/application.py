"""The FastAPI application over a service.

Owns: the routes, and the text of the framework's own errors. Must not know how a request is answered, nor when the
service starts and stops. The hot routes are here as well: app.http.hot answers their ordinary requests first.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from app.access.access import Access
from app.compat import client, torchserve
from app.config import split
from app.config.values import CLIENTS
from app.errors import Code, ServiceError, invalid_request
from app.http.api_description import describe_api
from app.http.docs_page import mount_docs
from app.http.edge import BIND, Edge
from app.http.playground import mount_playground
from app.http.routes import devices, infer, predict, repository, stats, status, v2
from app.ingress.ingress import Ingress
from app.observability.tracing import Tracing, untraced
from app.serving.service import Service

_CODES: dict[int, Code] = {404: "NOT_FOUND", 405: "METHOD_NOT_ALLOWED", 413: "BODY_TOO_LARGE"}


# Handlers sit inside the middleware, which alone knows the request id: they translate and raise on.
async def _framework_error(request: Any, error: Any) -> Any:
    code = _CODES.get(error.status_code, "INVALID_REQUEST" if error.status_code < 500 else "INTERNAL")
    if code == "NOT_FOUND":
        message = f"there is nothing at {request.url.path}; /docs lists what there is"
    elif code == "METHOD_NOT_ALLOWED":
        message = f"{request.method} is not allowed at {request.url.path}"
    else:
        message = str(error.detail)
    headers = [(name.lower().encode(), value.encode()) for name, value in (error.headers or {}).items()]
    raise ServiceError(code, message, headers=headers) from None


async def _validation_error(_request: Any, error: Any) -> Any:
    first = error.errors()[0]
    raise invalid_request(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None


def _telemetry(tracing: Tracing | None) -> dict[str, Any]:
    """Return the options for FastAPI's own spans, if it has them: ours then go into these."""
    if tracing is None or "telemetry" not in inspect.signature(FastAPI).parameters:
        return {}
    return {"telemetry": {"tracer_provider": tracing.provider, "metrics": False, "logs": False, "exclude": untraced}}


def create_app(service: Service, *, hosted: bool = False, share: float = 1.0) -> FastAPI:
    """Make the application over a service that its caller starts and stops; `hosted`: others listen for it. `share`: of
    the bytes that requests may hold; other ingresses have the rest.

    Raises KeysError.
    """
    app = FastAPI(
        title="anychip",
        **_telemetry(service.tracing),
        summary="Classifies and detects in images, on any accelerator PyTorch reaches",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.link = service.link
    app.state.ingress = ingress = Ingress(service.link, Access(service.settings, hosted=hosted), share)
    service.on_stop.append(ingress.close)
    app.state.stats_feed = stats.StatsFeed(service.link)
    app.add_exception_handler(HTTPException, _framework_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    settings = service.settings
    on_public = settings.admin == "port"
    add_routes(app, playground=settings.playground, compat=split(settings.compat), administered=on_public)
    app.add_middleware(Edge, ingress=ingress)
    return app


def add_routes(app: FastAPI, *, playground: bool, compat: Sequence[str], administered: bool = True) -> None:
    """Add every route. Each one needs a rule in app.access.rules, or no client reaches it."""
    for name in compat:  # Before ours: X-AnyLabeling's list of models has more in it.
        if name not in CLIENTS:
            app.include_router(client.router(name))
    for each in (predict, status, v2, infer, repository, devices, torchserve, stats):
        app.include_router(each.router)
    describe_api(app)
    mount_docs(app, administered=administered)
    app.state.page = None
    if playground:
        mount_playground(app)


class AdminFront:
    """Application of the administration's own port: every route, and alone those that change something."""

    def __init__(self, app: FastAPI) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        scope[BIND] = "admin"
        await self._app(scope, receive, send)
