"""Clients of other servers that packages answer, by the entry-point group `anychip.clients`: `--compat NAME`.

A package brings a module with `router` and `NEEDS` (the need of each of its paths), and perhaps `collector`, which
makes further metrics of ours (app.serving); or, for clients that post a JSON object with one image in base64, a
JsonClient, which gives the path, the model and the form of the answer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from fastapi import APIRouter, Request, Response

from anychip_base.extras import entry_points
from app.access.rules import offer
from app.config.values import CLIENT_GROUP
from app.errors import ServiceError
from app.http.call import AsgiRequest, HttpCall, as_json, as_response
from app.ingress.budget import Lease
from app.ingress.cascade import predict_cascade
from app.ingress.ingress import Ingress, Run
from app.ingress.prediction import Answer
from app.link import ServedModel, Terms
from app.protocols import documents
from models.contract.cascade import Cascade
from models.contract.model import Options


class JsonClient(ABC):
    """Client that posts a JSON object to `path`. The image is its text `image` or `file`."""

    path: ClassVar[str]

    @abstractmethod
    def choose(self, document: Mapping[str, Any], cascades: Mapping[str, Cascade]) -> tuple[str, Options]:
        """Return the name of the cascade that answers, and its options; for an empty document: the likely one.

        `document`: the posted object, without the image. Raises ServiceError.
        """

    @abstractmethod
    def answer(self, document: Mapping[str, Any], entry: Mapping[str, Any], request_id: str) -> Any:
        """Make the answer of the entry that the cascade made of the image."""

    @abstractmethod
    def refuse(self, error: ServiceError, request_id: str) -> Any:
        """Make the body of an answer with the error's status."""


class ClientCall(HttpCall[Answer]):
    """Call of such a client; `document` is there once it was read."""

    def __init__(self, client: JsonClient, request: AsgiRequest, model: str) -> None:
        super().__init__(request, model)
        self._client = client
        self.document: Mapping[str, Any] = {}

    async def asked(self, ingress: Ingress, served: ServedModel, terms: Terms, lease: Lease) -> Run[Answer]:
        """Return the run that the JSON asks for. Raises INVALID_REQUEST, and the errors of the client's contract."""
        packed = await ingress.converter.convert(documents.packed_with_image, 0, self.body)
        lease.take(len(packed))
        self.document, [image] = documents.unpack(packed)
        name, options = self._client.choose(self.document, ingress.link.cascades)
        first, cascade = self.context.choose(name), ingress.link.cascades[name]
        return lambda: predict_cascade(ingress, cascade, first, [image], terms, options=options)


def router(name: str) -> APIRouter:
    """Return the routes of a client that an installed package answers. Raises ValueError if it brings another thing."""
    [entry] = entry_points(CLIENT_GROUP, name=name)
    brought = entry.load()
    if isinstance(getattr(brought, "router", None), APIRouter):
        offer(brought.NEEDS)
        return brought.router  # type: ignore[no-any-return]
    client = brought()
    if not isinstance(client, JsonClient):
        raise ValueError(f"{entry.value} has no router, and makes no app.compat.client.JsonClient")
    offer({client.path: {"POST": "infer"}})
    found = APIRouter(tags=[name], include_in_schema=False)

    @found.post(client.path)
    async def route(request: Request) -> Response:
        ingress: Ingress = request.app.state.ingress
        asked = AsgiRequest.of(request)
        request_id: str = request.scope["anychip"].request_id
        try:
            call = ClientCall(client, asked, client.choose({}, ingress.link.cascades)[0])
            answered = await ingress.answer(call)
        except ServiceError as error:
            refused = as_response(as_json(client.refuse(error, request_id)))
            refused.status_code = error.status
            return refused
        return as_response(as_json(client.answer(call.document, answered.predictions[0], request_id)))

    return found
