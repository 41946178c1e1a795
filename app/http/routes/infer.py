"""`POST /v2/models/{model}[/versions/{version}]/infer`: the Open Inference Protocol over REST.

    body ─► (inflate) ─► JSON, then the binary tensors ─► open_inference ─► JSON ─► binary tensors ─► (deflate)

Owns: how requests and answers lie in bodies: JSON, the binary tensor extension, raw binary requests, compression. Must
not know what inputs and outputs mean.
"""

from __future__ import annotations

import base64
import binascii
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson
from fastapi import APIRouter, Request, Response
from starlette.types import Receive, Scope

from app.errors import ServiceError
from app.http.body import BodyBudget, Fields, header_number, read_body
from app.http.interrupt import unless_disconnected
from app.http.routes.predict import counted
from app.observability.triton_statistics import VERSION
from app.protocols import open_inference, wire
from app.protocols.context import RequestContext
from app.protocols.open_inference import Answered, Ask, Given, Result, Terms, Wanted
from app.protocols.parameters import switch
from app.protocols.wire import BYTES, bad
from app.serving.service import Service
from models import Model

router = APIRouter(tags=["inference"])
ROUTE = "/v2/models/{model}/infer"

Header = tuple[bytes, bytes]

_HEADER_LENGTH = b"inference-header-content-length"
_JSON_INLINE_BYTES = 64 * 1024
"""JSON up to this size is read in the event loop; tensors as JSON are larger and would hold it up for milliseconds."""
_COMPRESS_FROM_BYTES = 16 * 1024
_WORTH = 1  # zlib's level: tensors hardly shrink further at others, and those take longer.

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
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {
                "schema": {
                    "type": "object",
                    "required": ["inputs"],
                    "properties": {
                        "id": {"type": "string"},
                        "parameters": {"type": "object"},
                        "inputs": {"type": "array", "minItems": 1, "items": _TENSOR},
                        "outputs": {
                            "type": "array",
                            "items": {
                                "type": "object",
                                "required": ["name"],
                                "properties": {"name": {"type": "string"}, "parameters": {"type": "object"}},
                            },
                        },
                    },
                }
            },
            "application/octet-stream": {"schema": {"type": "string", "format": "binary"}},
        },
    },
    "responses": {
        "200": {
            "description": "The outputs",
            "content": {
                "application/json": {
                    "schema": {
                        "type": "object",
                        "required": ["model_name", "outputs"],
                        "properties": {
                            "model_name": {"type": "string"},
                            "model_version": {"type": "string"},
                            "id": {"type": "string"},
                            "parameters": {"type": "object"},
                            "outputs": {"type": "array", "items": _TENSOR},
                        },
                    }
                }
            },
        }
    },
}


@dataclass(frozen=True, slots=True)
class _Parsed:
    """A body's request; `binary`: of each output whether it goes back as bytes, of those not named `binary_default`."""

    ask: Ask
    id: str | None
    binary: Mapping[str, bool]
    binary_default: bool


@router.post(ROUTE, openapi_extra=_DOCUMENTATION, response_class=Response)
@router.post("/v2/models/{model}/versions/{version}/infer", openapi_extra=_DOCUMENTATION, response_class=Response)
async def infer(request: Request, model: str, version: str = "") -> Response:
    """Outputs of a model for one of its inputs, as JSON or as binary tensors."""
    state = request.app.state
    body, headers = await answer(state.service, state.bodies, request.scope, request.receive, model, version=version)
    response = Response(body)
    response.raw_headers[:] = headers
    return response


async def answer(
    service: Service, bodies: BodyBudget, scope: Scope, receive: Receive, model: str, *, version: str = ""
) -> tuple[bytes, list[Header]]:
    """The body and headers of a good answer. Raises ServiceError, starlette's ClientDisconnect."""
    context: RequestContext = scope["anychip"]
    served = open_inference.find(service, model, version)
    context.model = model
    service.refuse_if_stopping()
    headers = dict(scope["headers"])
    timeout_s = header_number(headers, "X-Timeout-Ms", service.settings.timeout_ms, 1e-3, 1e9) / 1e3
    priority = int(header_number(headers, "X-Priority", 0, -100, 100))
    deadline_s = context.started_s + timeout_s
    service.admit(served, deadline_s, priority)
    with counted(served):
        body = await read_body(receive, headers, service.settings.max_body_bytes, bodies, deadline_s)
    served.metrics.stage_seconds["upload"].observe(time.monotonic() - context.started_s, context.exemplar)
    held = len(body)
    try:
        encoding = headers.get(b"content-encoding", b"").decode("latin-1").strip().lower()
        if encoding not in ("", "identity"):
            body = await service.offload(_inflated, encoding, body, service.settings.max_body_bytes)
            bodies.take(len(body))
            held += len(body)
        header_bytes = _header_bytes(headers, len(body))
        parse = (_parsed, served.model, body, header_bytes)
        large = min(header_bytes if header_bytes is not None else len(body), len(body)) > _JSON_INLINE_BYTES
        parsed = await service.offload(*parse) if large else _parsed(*parse[1:])
        terms = Terms(context.started_s, timeout_s, priority, context.timings, context.trace, context.exemplar)
        work = open_inference.prepare(service, served, parsed.ask, terms)
        answered = await unless_disconnected(receive, open_inference.run(service, served, work), work.request.abandon)
    finally:
        bodies.give(held)
    content, content_headers = _encoded(model, parsed, answered)
    accepted = headers.get(b"accept-encoding", b"").decode("latin-1").lower()
    if len(content) >= _COMPRESS_FROM_BYTES and (kind := next((k for k in _WINDOW if k in accepted), "")):
        content = await service.offload(_deflated, kind, content)
        content_headers.append((b"content-encoding", kind.encode()))
    return content, [*content_headers, (b"content-length", b"%d" % len(content))]


def _header_bytes(headers: Fields, size: int) -> int | None:
    """How many bytes of the body are JSON; None: all of them. Raises INVALID_REQUEST."""
    given = headers.get(_HEADER_LENGTH)
    if given is None:
        return None
    if not given.isdigit() or len(given) > 18:
        raise bad(f"Inference-Header-Content-Length must be a whole number, not {given.decode('latin-1')!r}")
    if int(given) > size:
        raise bad(f"Inference-Header-Content-Length is {int(given)}, but the body has {size} bytes")
    return int(given)


def _parsed(model: Model, body: bytes, header_bytes: int | None) -> _Parsed:
    """Raises INVALID_REQUEST."""
    if header_bytes == 0:
        return _Parsed(Ask([open_inference.raw(model, body)]), None, {}, True)
    view = memoryview(body)
    try:
        document = orjson.loads(view if header_bytes is None else view[:header_bytes])
    except orjson.JSONDecodeError as error:
        hint = "" if header_bytes else "; with binary tensors, Inference-Header-Content-Length says how much of it is"
        raise bad(f"the request is not JSON: {error}{hint}") from None
    if not isinstance(document, dict):
        raise bad('the request must be a JSON object with "inputs"')
    parameters = _parameters(document, "the request")
    binary_default = switch(parameters, "binary_data_output")
    binary: dict[str, bool] = {}
    outputs = []
    for number, output in enumerate(_objects(document, "outputs")):
        name = _name(output, f"output {number}")
        asked = _parameters(output, name)
        binary[name] = switch(asked, "binary_data", binary_default)
        outputs.append(Wanted(name, open_inference.classification_of(name, asked)))
    rest = view[len(body) if header_bytes is None else header_bytes :]
    inputs = _inputs(_objects(document, "inputs"), rest)
    id_ = document.get("id")
    checked = None if id_ is None else open_inference.checked_id(id_)
    return _Parsed(Ask(inputs, outputs, parameters), checked, binary, binary_default)


def _inputs(tensors: Sequence[Mapping[str, Any]], rest: memoryview) -> list[Given]:
    """The inputs; `rest`: the bytes after the JSON, all of which must belong to one of them. Raises INVALID_REQUEST."""
    inputs = []
    for number, tensor in enumerate(tensors):
        name = _name(tensor, f"input {number}")
        datatype = tensor.get("datatype")
        if not isinstance(datatype, str):
            raise bad(f"the datatype of {name} must be a string")
        shape = open_inference.checked_shape(name, tensor.get("shape"))
        parameters = _parameters(tensor, name)
        if "shared_memory_region" in parameters:
            raise bad("shared memory is not offered here; send the tensor itself")
        size = parameters.get("binary_data_size")
        if size is None and "data" not in tensor and len(tensors) == 1 and rest:
            size = len(rest)
        if size is None:
            inputs.append(Given(name, datatype, shape, None, _values(name, datatype, tensor), parameters))
            continue
        if "data" in tensor:
            raise bad(f"{name} has both data and binary_data_size")
        if type(size) is not int or not 0 <= size <= len(rest):
            raise bad(f"the binary_data_size of {name} is {size!r}, but {len(rest)} bytes are left of the body")
        inputs.append(Given(name, datatype, shape, rest[:size], None, parameters))
        rest = rest[size:]
    if rest:
        raise bad(f"the body goes on for {len(rest)} bytes after its last tensor")
    return inputs


def _values(name: str, datatype: str, tensor: Mapping[str, Any]) -> Any:
    data = tensor.get("data")
    if not isinstance(data, list):
        raise bad(f"{name} has neither a list as its data nor a binary_data_size")
    if datatype == "FP16":
        raise bad(f"{name} is FP16, which has no form in JSON; send it as binary data")
    if datatype != BYTES:
        return data
    flat = [each for part in data for each in (part if isinstance(part, list) else [part])]
    return [_decoded(name, number, element) for number, element in enumerate(flat)]


def _decoded(name: str, number: int, element: Any) -> bytes:
    """JSON strings hold characters, not bytes: images are sent in base64."""
    if not isinstance(element, str):
        raise bad(f"element {number} of {name} must be a string in base64")
    try:
        return base64.b64decode(element, validate=True)
    except (binascii.Error, ValueError) as error:
        raise bad(f"element {number} of {name} is not base64: {error}") from None


def _objects(document: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    listed = document.get(key)
    if listed is None and key == "outputs":
        return []
    if not isinstance(listed, list) or not all(isinstance(each, dict) for each in listed):
        raise bad(f'"{key}" must be a list of objects')
    return listed


def _name(tensor: Mapping[str, Any], which: str) -> str:
    name = tensor.get("name")
    if not isinstance(name, str):
        raise bad(f"{which} has no name")
    return name


def _parameters(owner: Mapping[str, Any], which: str) -> Mapping[str, Any]:
    parameters = owner.get("parameters")
    if parameters is None:
        return {}
    if not isinstance(parameters, dict) or any(isinstance(each, dict | list) for each in parameters.values()):
        raise bad(f"the parameters of {which} must be an object of strings, numbers and booleans")
    return parameters


def _encoded(model: str, parsed: _Parsed, answered: Answered) -> tuple[bytes, list[Header]]:
    outputs: list[dict[str, Any]] = []
    contents: list[bytes] = []
    for result in answered.results:
        output: dict[str, Any] = {"name": result.name, "datatype": result.datatype, "shape": result.shape}
        if parsed.binary.get(result.name, parsed.binary_default):
            content = wire.to_bytes(result.data)
            output["parameters"] = {"binary_data_size": len(content)}
            contents.append(content)
        else:
            output["data"] = _as_json(result)
        outputs.append(output)
    document = {
        "model_name": model,
        "model_version": VERSION,
        **({} if parsed.id is None else {"id": parsed.id}),
        "parameters": answered.made_by,
        "outputs": outputs,
    }
    head = orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY)
    if not contents:
        return head, [(b"content-type", b"application/json")]
    length = b"%d" % len(head)
    headers = [(b"content-type", b"application/octet-stream"), (_HEADER_LENGTH, length)]
    return b"".join([head, *contents]), headers


def _as_json(result: Result) -> Any:
    if isinstance(result.data, list):
        return [element.decode() for element in result.data]
    if result.datatype == "FP16":
        raise bad(f"the output {result.name} is FP16, which has no form in JSON; ask for it with binary_data")
    return result.data.reshape(-1)


_WINDOW = {"gzip": 31, "deflate": 15}
"""What zlib calls the two formats."""


def _inflated(encoding: str, body: bytes, most: int) -> bytes:
    """Raises UNSUPPORTED_MEDIA_TYPE, BODY_TOO_LARGE, INVALID_REQUEST."""
    if encoding not in _WINDOW:
        message = f"content encoding {encoding!r} is not read here; send gzip, deflate or none"
        raise ServiceError("UNSUPPORTED_MEDIA_TYPE", message)
    inflater = zlib.decompressobj(_WINDOW[encoding])
    try:
        inflated = inflater.decompress(body, most + 1)
    except zlib.error:
        raise bad(f"the body is no {encoding}") from None
    if len(inflated) > most:
        raise ServiceError("BODY_TOO_LARGE", f"inflated, the body is larger than the {most} bytes that are read here")
    if not inflater.eof or inflater.unused_data:
        raise bad(f"the {encoding} of the body {'goes on after its end' if inflater.eof else 'ends early'}")
    return inflated


def _deflated(encoding: str, content: bytes) -> bytes:
    deflater = zlib.compressobj(_WORTH, wbits=_WINDOW[encoding])
    return deflater.compress(content) + deflater.flush()
