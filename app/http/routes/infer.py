"""`POST /v2/models/{model}[/versions/{version}]/infer`: the Open Inference Protocol over REST.

    body ─► JSON, then the binary tensors ─► open_inference ─► JSON ─► binary tensors ─► (deflate)

Owns: the layout of requests and answers in bodies: JSON, the binary tensor extension, raw binary requests, compression.
Must not know what inputs and outputs mean.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import orjson
from fastapi import APIRouter, Request, Response

from app.errors import invalid_request
from app.http.answer import Content, as_response
from app.http.call import WINDOW, AsgiRequest, Body, Fields, HttpCall, HttpRequest
from app.ingress.budget import Lease
from app.ingress.inference import run
from app.ingress.ingress import Ingress, Run
from app.link import INLINE_BYTES, ServedModel, Terms
from app.observability.triton_statistics import FIRST_VERSION
from app.protocols import documents, open_inference, wire
from app.protocols.documents import name_of, parameters_of
from app.protocols.options import CLASSIFICATION, OPTIONS, PRIORITY, TIMEOUT_US
from app.protocols.parameters import read, switch
from app.protocols.tensors import (
    InferenceRequest,
    InferenceResponse,
    InputTensor,
    OutputTensor,
    RequestedOutput,
    checked_id,
)
from models import Model

router = APIRouter(tags=["inference"])
ROUTE = "/v2/models/{model}/infer"

_HEADER_LENGTH = b"inference-header-content-length"
_JSON_INLINE_BYTES = 64 * 1024
"""Largest JSON that is read in the event loop; a larger one would hold it up for milliseconds."""
_NUMBERS_INLINE_BYTES = 512 * 1024
"""Most bytes of numbers that the event loop writes as JSON."""
_COMPRESS_FROM_BYTES = 16 * 1024
_WORTH = 1  # zlib's level: others hardly shrink tensors further, and take longer.

_TENSOR = {
    "type": "object",
    "required": ["name", "shape", "datatype"],
    "properties": {
        "name": {"type": "string"},
        "shape": {"type": "array", "items": {"type": "integer"}},
        "datatype": {"type": "string"},
        "parameters": {"type": "object"},
        "data": {"type": "array", "items": {}},
    },
}
_DOCUMENTATION: dict[str, Any] = {
    "parameters": [
        {
            "name": "Inference-Header-Content-Length",
            "in": "header",
            "description": "bytes of JSON before the binary tensors; 0: the body is one image, or one tensor",
            "schema": {"type": "integer", "minimum": 0},
        }
    ],
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {
                "schema": {
                    "type": "object",
                    "required": ["inputs"],
                    "properties": {
                        "id": {"type": "string"},
                        "parameters": {
                            "type": "object",
                            "properties": {
                                row.name: {"description": row.text, **row.schema}
                                for row in (PRIORITY, TIMEOUT_US, *OPTIONS)
                            },
                        },
                        "inputs": {"type": "array", "minItems": 1, "items": _TENSOR},
                        "outputs": {
                            "type": "array",
                            "items": {
                                "type": "object",
                                "required": ["name"],
                                "properties": {
                                    "name": {"type": "string"},
                                    "parameters": {
                                        "type": "object",
                                        "properties": {CLASSIFICATION.name: CLASSIFICATION.schema},
                                    },
                                },
                            },
                        },
                    },
                }
            },
            "application/octet-stream": {"schema": {"type": "string", "format": "binary"}},
        },
    },
}


@dataclass(frozen=True, slots=True)
class _Parsed:
    """Request of a body. `binary`: True for an output that goes back as bytes; `binary_default`: for one not named.

    `version`: of the model that answers it.
    """

    request: InferenceRequest
    id: str | None
    binary: Mapping[str, bool]
    binary_default: bool
    version: str = FIRST_VERSION


@router.post(ROUTE, openapi_extra=_DOCUMENTATION, response_class=Response)
@router.post("/v2/models/{model}/versions/{version}/infer", openapi_extra=_DOCUMENTATION, response_class=Response)
async def infer(request: Request, model: str, version: str = "") -> Response:
    """Compute a model's outputs for its inputs (of images, for one of them), as JSON or as binary tensors."""
    return as_response(await answer(request.app.state.ingress, AsgiRequest.of(request), model, version))


async def answer(ingress: Ingress, request: HttpRequest, model: str, version: str = "") -> Content:
    """Return the content of a good answer. Raises ServiceError, ClientLeftError."""
    call = RestInferCall(request, model, version)
    response = await ingress.answer(call)
    call.context.hold(response.data_bytes, ingress.bodies)  # Before it is copied.
    parsed = replace(call.parsed, version=call.version or FIRST_VERSION)
    content, headers = await _encoded(ingress, model, parsed, response)
    accepted = call.headers.get(b"accept-encoding", b"").decode("latin-1").lower()
    if len(content) >= _COMPRESS_FROM_BYTES and (kind := next((k for k in WINDOW if k in accepted), "")):
        content = await ingress.offload(_deflated, kind, content)
        headers.append((b"content-encoding", kind.encode()))
    return content, [*headers, (b"content-length", b"%d" % len(content))]


class RestInferCall(HttpCall[InferenceResponse]):
    """Call with tensors in JSON, in binary, or raw. `parsed` is there once `asked` has ended."""

    parsed: _Parsed

    async def asked(  # noqa: D102
        self, ingress: Ingress, served: ServedModel, terms: Terms, lease: Lease
    ) -> Run[InferenceResponse]:
        header_bytes = _header_bytes(self.headers, len(self.body))
        self.parsed = await _parsed(ingress, served.model, self.body, header_bytes, lease)
        work = open_inference.prepare(
            ingress.link, served, self.parsed.request, terms, started_s=self.context.started_s, name=self.model
        )
        return lambda: run(ingress, served, work)


def _header_bytes(headers: Fields, size: int) -> int | None:
    """Return how many bytes of the body are JSON; None: all of them. Raises INVALID_REQUEST."""
    given = headers.get(_HEADER_LENGTH)
    if given is None:
        return None
    if not given.isdigit() or len(given) > 18:
        raise invalid_request(
            f"Inference-Header-Content-Length must be a whole number, not {given.decode('latin-1')!r}"
        )
    if int(given) > size:
        raise invalid_request(f"Inference-Header-Content-Length is {int(given)}, but the body has {size} bytes")
    return int(given)


async def _parsed(ingress: Ingress, model: Model, body: Body, header_bytes: int | None, lease: Lease) -> _Parsed:
    """Read the request of a body. Raises INVALID_REQUEST."""
    if header_bytes == 0:
        return _Parsed(InferenceRequest([open_inference.raw(model, body)]), None, {}, True)
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
        outputs.append(RequestedOutput(name, read(CLASSIFICATION, asked)))
    inputs = [
        InputTensor(
            tensor["name"], tensor["datatype"], tuple(tensor["shape"]), content, None, parameters_of(tensor, "an input")
        )
        for tensor, content in zip(document["inputs"], contents, strict=True)
    ]
    id_ = document.get("id")
    checked = None if id_ is None else checked_id(id_)
    return _Parsed(InferenceRequest(inputs, outputs, parameters), checked, binary, binary_default)


async def _encoded(ingress: Ingress, model: str, parsed: _Parsed, response: InferenceResponse) -> Content:
    """Write the answer; another thread or process copies and writes a large one: 64 images may have megabytes each."""
    size = response.data_bytes
    head: bytes | memoryview
    if size <= INLINE_BYTES:
        document, contents, numbers = _drafted(model, parsed, response)
    else:
        document, contents, numbers = await ingress.offload(_drafted, model, parsed, response)
    if numbers:
        packed = await ingress.offload(_packed, document, numbers)
        head = await ingress.converter.convert(documents.write_outputs, 0, packed)
    else:
        head = orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY)
    if not contents:
        return head, [(b"content-type", b"application/json")]
    length = b"%d" % len(head)
    headers = [(b"content-type", b"application/octet-stream"), (_HEADER_LENGTH, length)]
    parts = [head, *contents]
    return (b"".join(parts) if size <= INLINE_BYTES else await ingress.offload(wire.joined, parts)), headers


def _packed(document: dict[str, Any], numbers: list[bytes | memoryview]) -> memoryview:
    return documents.pack(document, numbers, limited=False)


def _drafted(
    model: str, parsed: _Parsed, response: InferenceResponse
) -> tuple[dict[str, Any], list[bytes | memoryview], list[bytes | memoryview]]:
    """Draft an answer: its JSON, the bytes that follow it, and the numbers that are still to be written into it."""
    outputs: list[dict[str, Any]] = []
    contents: list[bytes | memoryview] = []
    numbers: list[bytes | memoryview] = []  # Data of outputs in JSON, if there are many.
    in_json = [output for output in response.outputs if not parsed.binary.get(output.name, parsed.binary_default)]
    many = sum(each.data.nbytes for each in in_json if isinstance(each.data, np.ndarray)) > _NUMBERS_INLINE_BYTES
    for result in response.outputs:
        output: dict[str, Any] = {"name": result.name, "datatype": result.datatype, "shape": result.shape}
        if parsed.binary.get(result.name, parsed.binary_default):
            content = wire.content_of(result.data)
            output["parameters"] = {"binary_data_size": len(content)}
            contents.append(content)
        elif many and isinstance(data := _as_json(result), np.ndarray):
            output["data"] = None
            numbers.append(wire.content_of(data))
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
    return document, contents, numbers


def _as_json(result: OutputTensor) -> Any:
    if isinstance(result.data, list):
        return [element.decode() for element in result.data]
    if result.datatype == "FP16":
        raise invalid_request(
            f"the output {result.name} is FP16, which has no form in JSON; ask for it with binary_data"
        )
    return result.data.reshape(-1)


def _deflated(encoding: str, content: bytes) -> bytes:
    deflater = zlib.compressobj(_WORTH, wbits=WINDOW[encoding])
    return deflater.compress(content) + deflater.flush()
