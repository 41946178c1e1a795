"""What the service of one card hands on to the process that starts them all (app.cards): what is asked of all cards.

Owns: which routes these are, and passing a request on. The caller has been admitted here, as everywhere. Must not know
how the answers of several cards become one.
"""

from __future__ import annotations

from typing import Any

import httpx
from fastapi import APIRouter, Request, Response
from fastapi.routing import APIRoute
from starlette.responses import StreamingResponse
from starlette.routing import Match
from starlette.types import Scope

from app.access.rules import HEADERS_FOR_CARDS, OF_ALL_CARDS
from app.errors import ServiceError
from app.http.edge import BIND

_PASSED_BACK = ("content-type", "retry-after", "cache-control")


class _PublicRoute(APIRoute):
    """Is there for clients alone: at the administration's own address this service answers for itself."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        if scope.get(BIND) == "admin":
            return Match.NONE, {}
        return super().matches(scope)


def router(all_cards: str) -> APIRouter:
    """The routes, handed on to the process at this URL."""
    routes = APIRouter(route_class=_PublicRoute, include_in_schema=False)
    client = httpx.AsyncClient(base_url=all_cards, timeout=None, trust_env=False)

    async def hand_on(request: Request) -> Any:
        headers = {name: request.headers[name] for name in HEADERS_FOR_CARDS if name in request.headers}
        asked = client.build_request(
            request.method,
            request.url.path,
            params=request.query_params,
            headers=headers,
            content=await request.body(),
        )
        try:
            answer = await client.send(asked, stream=True)
        except httpx.HTTPError as error:
            message = f"the process that starts the cards' services does not answer: {error}"
            raise ServiceError("NOT_READY", message, retry_after_s=1) from None
        headers = {name: answer.headers[name] for name in _PASSED_BACK if name in answer.headers}
        if headers.get("content-type", "").startswith("text/event-stream"):

            async def events() -> Any:
                try:
                    async for piece in answer.aiter_raw():
                        yield piece
                finally:
                    await answer.aclose()

            return StreamingResponse(events(), answer.status_code, headers)
        try:
            return Response(await answer.aread(), answer.status_code, headers)
        finally:
            await answer.aclose()

    for path, method in OF_ALL_CARDS.items():
        routes.add_api_route(path, hand_on, methods=[method], response_model=None)
    return routes
