"""`/v2`: the Open Inference Protocol over REST, and the requests of Triton's tools; health is in status.

body ─► JSON, then the binary tensors ─► open_inference ─► JSON ─► binary tensors ─► (deflate)
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import orjson
from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, ConfigDict

from app.errors import invalid_request
from app.http.call import LENGTH_DIGITS, WINDOW, AsgiRequest, Body, Content, Fields, HttpCall, HttpRequest, as_response
from app.ingress.budget import Lease
from app.ingress.context import UNCOUNTED_BYTES
from app.ingress.inference import run
from app.ingress.ingress import Ingress, Run
from app.link import INLINE_BYTES, Link, ServedModel, Terms
from app.observability.triton_statistics import FIRST_VERSION, of_version
from app.protocols import documents, open_inference, signatures, wire
from app.protocols.documents import name_of, parameters_of
from app.protocols.options import CLASSIFICATION, INFER, check_names
from app.protocols.parameters import pairs_of, read, switch

router = APIRouter(tags=["inference"])
ROUTE = "/v2/models/{model}/infer"

_HEADER_LENGTH = b"inference-header-content-length"
_JSON_INLINE_BYTES = 64 * 1024
"""Largest JSON that is read in the event loop; a larger one would hold it up for milliseconds."""
_NUMBERS_INLINE_BYTES = 512 * 1024
"""Most bytes of numbers that the event loop writes as JSON."""
_COMPRESS_FROM_BYTES = 16 * 1024
_WORTH = 1  # zlib's level: others hardly shrink tensors further, and take longer.


def _object(*required: str, **properties: Any) -> dict[str, Any]:
    return {"type": "object", **({"required": [*required]} if required else {}), "properties": properties}


def _list(items: dict[str, Any], **limits: int) -> dict[str, Any]:
    return {"type": "array", "items": items, **limits}


_TEXT = {"type": "string"}
_TENSOR = _object(
    *("name", "shape", "datatype"),
    name=_TEXT,
    shape=_list({"type": "integer"}),
    datatype=_TEXT,
    parameters={"type": "object"},
    data=_list({}),
)
_OUTPUT = _object("name", name=_TEXT, parameters=_object(classification=CLASSIFICATION.schema))
_PARAMETERS = _object(**{row.name: {"description": row.text, **row.schema} for row in INFER})
_REQUEST = _object(
    "inputs", id=_TEXT, parameters=_PARAMETERS, inputs=_list(_TENSOR, minItems=1), outputs=_list(_OUTPUT)
)
_DOCUMENTATION: dict[str, Any] = {
    "parameters": [
        {
            "name": "Inference-Header-Content-Length",
            "in": "header",
            "description": "bytes of JSON before tensors; 0: the body is an image or tensor, the query has parameters",
            "schema": {"type": "integer", "minimum": 0},
        }
    ],
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {"schema": _REQUEST},
            "application/octet-stream": {"schema": {"type": "string", "format": "binary"}},
        },
    },
}


class ModelReady(BaseModel):
    """Answer of a model that is ready."""

    name: str
    ready: bool


class ServerMetadata(BaseModel):
    """Name, version and extensions of the server."""

    name: str
    version: str
    extensions: list[str]


class TensorMetadata(BaseModel):
    """A tensor; -1: a dimension that may vary."""

    name: str
    datatype: str
    shape: list[int]


class ModelMetadata(BaseModel):
    """Inputs of a model (of images, one of them a request) and outputs; `parameters`: how it is served."""

    name: str
    versions: list[str]
    platform: str
    inputs: list[TensorMetadata]
    outputs: list[TensorMetadata]
    parameters: dict[str, Any]


class Statistics(BaseModel):
    """Triton's statistics."""

    model_config = ConfigDict(protected_namespaces=())

    model_stats: list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class _Parsed:
    """Request of a body. `binary`: True for an output that goes back as bytes; `binary_default`: for one not named.

    `version`: of the model that answers it.
    """

    request: wire.InferenceRequest
    id: str | None
    binary: Mapping[str, bool]
    binary_default: bool
    version: str = FIRST_VERSION


@router.get("/v2/", include_in_schema=False)
@router.get("/v2")
async def get_server() -> ServerMetadata:
    """Return the server's name, version and extensions."""
    return ServerMetadata(**signatures.server_metadata())


# Before the routes of models, as in Triton: its clients ask here for all of them.
@router.get("/v2/models/stats", include_in_schema=False)
@router.get("/v2/stats", include_in_schema=False)
async def all_statistics(request: Request) -> Statistics:
    """Return the statistics of every model."""
    return Statistics(model_stats=signatures.statistics(request.app.state.link))


@router.get("/v2/models/{model}")
@router.get("/v2/models/{model}/versions/{version}")
async def get_metadata(request: Request, model: str, version: str = "") -> ModelMetadata:
    """Return a model's inputs and outputs."""
    link: Link = request.app.state.link
    return ModelMetadata.model_validate(signatures.metadata(link, model, version))


@router.get("/v2/models/{model}/ready", responses={503: {"description": "Not ready, with the reason"}})
@router.get("/v2/models/{model}/versions/{version}/ready", responses={503: {"description": "Not ready"}})
async def is_model_ready(request: Request, model: str, version: str = "") -> ModelReady:
    """Answer 200 while the model has a worker and the service is not shutting down."""
    link: Link = request.app.state.link
    link.find(model, version)
    link.administration.check(*link.parts(model))
    return ModelReady(name=model, ready=True)


@router.get("/v2/models/{model}/config")
@router.get("/v2/models/{model}/versions/{version}/config")
async def get_configuration(request: Request, model: str, version: str = "") -> dict[str, Any]:
    """Return a model's configuration in Triton's terms."""
    link: Link = request.app.state.link
    return signatures.configuration(link, model, version)


@router.get("/v2/models/{model}/stats")
@router.get("/v2/models/{model}/versions/{version}/stats")
async def get_statistics(request: Request, model: str, version: str = "") -> Statistics:
    """Return requests, images, batches and time by stage since the start, as Triton counts them."""
    return Statistics(model_stats=signatures.statistics(request.app.state.link, model, version))


@router.post(ROUTE, openapi_extra=_DOCUMENTATION, response_class=Response)
@router.post("/v2/models/{model}/versions/{version}/infer", openapi_extra=_DOCUMENTATION, response_class=Response)
async def infer(request: Request, model: str, version: str = "") -> Response:
    """Compute a model's outputs for its inputs (of images, for one of them), as JSON or as binary tensors."""
    return as_response(await answer(request.app.state.ingress, AsgiRequest.of(request), model, version))


async def answer(ingress: Ingress, request: HttpRequest, model: str, version: str = "") -> Content:
    """Return the content of a good answer. Raises ServiceError, ClientLeftError."""
    call = RestInferCall(request, model, version)
    response = await ingress.answer(call)
    if response.data_bytes > UNCOUNTED_BYTES:
        call.context.hold(response.data_bytes, ingress.bodies)  # Before it is copied.
    parsed = replace(call.parsed, version=of_version(call.context.model)[1])
    content, headers = await _encoded(ingress, model, parsed, response)
    accepted = call.headers.get(b"accept-encoding", b"").decode("latin-1").lower()
    if len(content) >= _COMPRESS_FROM_BYTES and (kind := next((k for k in WINDOW if k in accepted), "")):
        content = await ingress.offload(_deflated, kind, content)
        headers.append((b"content-encoding", kind.encode()))
    return content, [*headers, (b"content-length", b"%d" % len(content))]


class RestInferCall(HttpCall[wire.InferenceResponse]):
    """Call with tensors in JSON, in binary, or raw. `parsed` is there once `asked` has ended."""

    parsed: _Parsed

    async def asked(  # noqa: D102
        self, ingress: Ingress, served: ServedModel, terms: Terms, lease: Lease
    ) -> Run[wire.InferenceResponse]:
        header_bytes = _header_bytes(self.headers, len(self.body))
        query = dict(pairs := pairs_of(self.request.scope["query_string"]))
        if header_bytes == 0:
            if len(query) < len(pairs):
                raise invalid_request("a parameter of the query is given more than once")
            asked = wire.InferenceRequest([open_inference.raw(served.model, self.body)], parameters=query)
            self.parsed = _Parsed(asked, None, {}, True)
        else:
            check_names(query)
            self.parsed = await _parsed(ingress, self.body, header_bytes, lease)
        work = open_inference.prepare(
            ingress.link, served, self.parsed.request, terms, started_s=self.context.started_s, name=self.model
        )
        return lambda: run(ingress, served, work)


def _header_bytes(headers: Fields, size: int) -> int | None:
    """Return how many bytes of the body are JSON; None: all of them. Raises INVALID_REQUEST."""
    given = headers.get(_HEADER_LENGTH)
    if given is None:
        return None
    if not given.isdigit() or len(given) > LENGTH_DIGITS:
        raise invalid_request(
            f"Inference-Header-Content-Length must be a whole number, not {given.decode('latin-1')!r}"
        )
    if int(given) > size:
        raise invalid_request(f"Inference-Header-Content-Length is {int(given)}, but the body has {size} bytes")
    return int(given)


async def _parsed(ingress: Ingress, body: Body, header_bytes: int | None, lease: Lease) -> _Parsed:
    """Read the request of a body that has JSON. Raises INVALID_REQUEST."""
    if (len(body) if header_bytes is None else header_bytes) <= _JSON_INLINE_BYTES:
        document, contents = documents.read_tensors(body, header_bytes)
    else:
        packed = await ingress.converter.convert(documents.packed_tensors, header_bytes or 0, body)
        lease.take(len(packed))
        document, contents = documents.unpack(packed)
    parameters = parameters_of(document, "the request")
    binary_default = switch(parameters, "binary_data_output")
    binary: dict[str, bool] = {}
    outputs = []
    for number, output in enumerate(documents.objects(document, "outputs")):
        name = name_of(output, f"output {number}")
        asked = parameters_of(output, name)
        binary[name] = switch(asked, "binary_data", binary_default)
        outputs.append(wire.RequestedOutput(name, read(CLASSIFICATION, asked), asked))
    inputs = [
        wire.InputTensor(
            tensor["name"], tensor["datatype"], tuple(tensor["shape"]), content, None, parameters_of(tensor, "an input")
        )
        for tensor, content in zip(document["inputs"], contents, strict=True)
    ]
    id_ = document.get("id")
    checked = None if id_ is None else wire.checked_id(id_)
    return _Parsed(wire.InferenceRequest(inputs, outputs, parameters), checked, binary, binary_default)


async def _encoded(ingress: Ingress, model: str, parsed: _Parsed, response: wire.InferenceResponse) -> Content:
    """Write the answer: JSON, and behind it the outputs that the client wants as bytes.

    64 images may have megabytes each: a thread copies a large answer, and another process writes its numbers as JSON.
    """
    size = response.data_bytes
    head: bytes | memoryview
    if size <= INLINE_BYTES:
        document, binary_outputs, json_outputs = _parts(model, parsed, response)
    else:
        document, binary_outputs, json_outputs = await ingress.offload(_parts, model, parsed, response)
    if json_outputs:
        packed = await ingress.offload(partial(documents.pack, limited=False), document, json_outputs)
        head = await ingress.converter.convert(documents.write_outputs, 0, packed)
    else:
        head = orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY)
    if not binary_outputs:
        return head, [(b"content-type", b"application/json")]
    length = b"%d" % len(head)
    headers = [(b"content-type", b"application/octet-stream"), (_HEADER_LENGTH, length)]
    parts = [head, *binary_outputs]
    return (b"".join(parts) if size <= INLINE_BYTES else await ingress.offload(wire.joined, parts)), headers


def _parts(
    model: str, parsed: _Parsed, response: wire.InferenceResponse
) -> tuple[dict[str, Any], list[bytes | memoryview], list[bytes | memoryview]]:
    """Return the parts of an answer: the JSON document, the outputs whose bytes follow it, and the large outputs that
    another process writes into the document, where their "data" is null.
    """
    outputs: list[dict[str, Any]] = []
    binary_outputs: list[bytes | memoryview] = []
    json_outputs: list[bytes | memoryview] = []
    in_json = [output for output in response.outputs if not parsed.binary.get(output.name, parsed.binary_default)]
    many = sum(each.data.nbytes for each in in_json if isinstance(each.data, np.ndarray)) > _NUMBERS_INLINE_BYTES
    for result in response.outputs:
        output: dict[str, Any] = {"name": result.name, "datatype": result.datatype, "shape": result.shape}
        if parsed.binary.get(result.name, parsed.binary_default):
            content = wire.content_of(result.data)
            output["parameters"] = {"binary_data_size": len(content)}
            binary_outputs.append(content)
        elif many and isinstance(data := _as_json(result), np.ndarray):
            output["data"] = None
            json_outputs.append(wire.content_of(data))
        else:
            output["data"] = _as_json(result)
        outputs.append(output)
    document = {
        "model_name": model,
        "model_version": parsed.version,
        **({} if parsed.id is None else {"id": parsed.id}),
        "parameters": response.made_by,
        "outputs": outputs,
    }
    return document, binary_outputs, json_outputs


def _as_json(result: wire.OutputTensor) -> Any:
    if isinstance(result.data, list):
        return [element.decode() for element in result.data]
    if result.datatype == "FP16" or (result.data.dtype.kind == "f" and np.isinf(result.data).any()):
        what = "is FP16" if result.datatype == "FP16" else "holds infinity"
        raise invalid_request(f"output {result.name} {what}, which has no form in JSON; ask for it with binary_data")
    return result.data.reshape(-1)


def _deflated(encoding: str, content: bytes) -> bytes:
    deflater = zlib.compressobj(_WORTH, wbits=WINDOW[encoding])
    return deflater.compress(content) + deflater.flush()
