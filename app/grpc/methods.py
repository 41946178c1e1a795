"""The methods of `inference.GRPCInferenceService`: messages to requests of the service, its answers to messages.

Owns: how tensors, parameters and errors look in messages. Must not decide anything that REST could decide otherwise.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from typing import Any

import grpc
from google.protobuf import json_format

from app import logs
from app.errors import GRPC_STATUS, ServiceError
from app.grpc.messages import SERVICE, message
from app.http import edge
from app.http.body import BodyBudget
from app.observability.triton_statistics import VERSION
from app.protocols import open_inference, triton, wire
from app.protocols.open_inference import Answered, Ask, Given, Terms, Wanted
from app.protocols.parameters import read_priority
from app.protocols.wire import BYTES, bad
from app.serving.repository import Repository
from app.serving.service import Service

log = logging.getLogger("anychip.rpc")

Message = Any
Context = Any

_INFER = f"/{SERVICE}/ModelInfer"
_CONTENTS = {
    "BOOL": "bool_contents",
    **dict.fromkeys(("INT8", "INT16", "INT32"), "int_contents"),
    "INT64": "int64_contents",
    **dict.fromkeys(("UINT8", "UINT16", "UINT32"), "uint_contents"),
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    BYTES: "bytes_contents",
}


class Methods:
    """By their names in the protocol, lower-cased: what app.grpc.server registers."""

    def __init__(self, service: Service, repository: Repository, bodies: BodyBudget) -> None:
        self._service, self._repository, self._bodies = service, repository, bodies

    async def server_live(self, _request: Message, _context: Context) -> Message:
        """The event loop answers."""
        return message("ServerLiveResponse")(live=True)

    async def server_ready(self, _request: Message, _context: Context) -> Message:
        """Every model has a worker."""
        return message("ServerReadyResponse")(ready=not self._service.not_ready())

    async def model_ready(self, request: Message, _context: Context) -> Message:
        """The model has a worker."""
        served = open_inference.find(self._service, request.name, request.version)
        return message("ModelReadyResponse")(ready=not self._service.model_not_ready(served))

    async def server_metadata(self, _request: Message, _context: Context) -> Message:
        """Name, version, extensions."""
        return _filled("ServerMetadataResponse", open_inference.server_metadata())

    async def model_metadata(self, request: Message, _context: Context) -> Message:
        """Inputs and outputs."""
        metadata = open_inference.metadata(self._service, request.name, request.version)
        return _filled("ModelMetadataResponse", metadata)

    async def model_config(self, request: Message, _context: Context) -> Message:
        """Triton's configuration."""
        served = open_inference.find(self._service, request.name, request.version)
        return _filled("ModelConfigResponse", {"config": triton.configuration(self._service, served)})

    async def model_statistics(self, request: Message, _context: Context) -> Message:
        """Of one model, or of all."""
        statistics = triton.statistics(self._service, request.name, request.version)
        return _filled("ModelStatisticsResponse", {"model_stats": statistics})

    async def repository_index(self, request: Message, _context: Context) -> Message:
        """Every model with its state."""
        return _filled("RepositoryIndexResponse", {"models": triton.index(self._service, request.ready)})

    async def repository_model_load(self, request: Message, _context: Context) -> Message:
        """Load again."""
        triton.check_parameters(request.parameters)
        await self._repository.load(request.model_name)
        return message("RepositoryModelLoadResponse")()

    async def repository_model_unload(self, request: Message, _context: Context) -> Message:
        """Unload."""
        triton.check_parameters(request.parameters)
        await self._repository.unload(request.model_name)
        return message("RepositoryModelUnloadResponse")()

    async def model_infer(self, request: Message, context: Context) -> Message:
        """Outputs of a model for one of its inputs. Raises ServiceError; cancelled, it gives up its reservation."""
        scope = {
            "type": "http",
            "method": "POST",
            "path": _INFER,
            "headers": _headers(context),
        }  # As it is on the wire.
        known = edge.begun(self._service, scope)
        known.route = _INFER
        status, code = 500, "INTERNAL"
        try:
            served = open_inference.find(self._service, request.model_name, request.model_version)
            known.model = request.model_name
            terms = Terms(known.started_s, *self._terms(context), known.timings, known.trace, known.exemplar)
            response = await self._infer(served, request, context, terms)
            status, code = 200, "OK"
        except ServiceError as error:
            status, code = error.status, error.code
            raise
        except asyncio.CancelledError:
            status, code = 0, "CANCELLED"
            raise
        finally:
            if known.trace is not None:
                known.trace.describe(known.attributes())
            edge.ended(self._service, scope, known, status, code)
        trailing = [("x-request-id", known.request_id), ("server-timing", known.timings.header())]
        if known.traceparent:
            trailing.append(("traceparent", known.traceparent.decode()))
        context.set_trailing_metadata(trailing)
        return response

    async def model_stream_infer(self, requests: AsyncIterator[Message], context: Context) -> AsyncIterator[Message]:
        """One answer a request, in their order; a request that fails does not end the stream."""
        async for request in requests:
            answer = message("ModelStreamInferResponse")()
            try:
                answer.infer_response.CopyFrom(await self.model_infer(request, context))
            except ServiceError as error:
                answer.error_message = error.message
                answer.infer_response.id = request.id
            yield answer

    def _terms(self, context: Context) -> tuple[float, int]:
        """Seconds until the call's deadline, at most our own; priority."""
        given = {str(key): value for key, value in context.invocation_metadata() or ()}
        remaining_s = context.time_remaining()
        timeout_s = self._service.settings.timeout_ms / 1e3
        priority = read_priority(given.get("x-priority"))
        return (timeout_s if remaining_s is None else max(0.0, remaining_s)), priority

    async def _infer(self, served: Any, request: Message, context: Context, terms: Terms) -> Message:
        service = self._service
        service.refuse_if_stopping()
        service.admit(served, terms.started_s + terms.timeout_s, terms.priority)
        held = sum(map(len, request.raw_input_contents)) or request.ByteSize()
        self._bodies.take(held)
        try:
            work = open_inference.prepare(service, served, _ask(request), terms)
            if context.time_remaining() is not None:  # What the request itself says cannot outlast its call.
                work.request.deadline_s = min(work.request.deadline_s, terms.started_s + terms.timeout_s)
            computing = asyncio.ensure_future(open_inference.run(service, served, work))
            try:
                answered = await asyncio.shield(computing)
            except asyncio.CancelledError:
                # Only a client that has gone cancels a call: said before the work itself hears of it.
                work.request.abandon()
                computing.cancel()
                await asyncio.gather(computing, return_exceptions=True)
                raise
        finally:
            self._bodies.give(held)
        return _response(request, answered)


async def refuse(context: Context, error: ServiceError) -> None:
    """End a call with an error's status, its sentence, and its code beside it."""
    trailing = [("x-request-id", logs.request_id.get() or edge.request_id(_headers(context))), ("code", error.code)]
    if error.retry_after_s is not None:
        trailing.append(("retry-after", str(error.retry_after_s)))
    await context.abort(grpc.StatusCode[GRPC_STATUS[error.code]], error.message, tuple(trailing))


def _headers(context: Context) -> list[tuple[bytes, bytes]]:
    return [
        (key.encode(), value if isinstance(value, bytes) else value.encode("latin-1", "replace"))
        for key, value in context.invocation_metadata() or ()
    ]


def _filled(name: str, document: Mapping[str, Any]) -> Message:
    return json_format.ParseDict(document, message(name)(), ignore_unknown_fields=True)


def _ask(request: Message) -> Ask:
    raw = list(request.raw_input_contents)
    if raw and len(raw) != len(request.inputs):
        raise bad(f"there are {len(request.inputs)} inputs and {len(raw)} raw_input_contents")
    open_inference.checked_id(request.id)
    inputs = []
    for number, tensor in enumerate(request.inputs):
        shape = open_inference.checked_shape(tensor.name, list(tensor.shape))
        parameters = _parameters(tensor.parameters)
        if "shared_memory_region" in parameters:
            raise bad("shared memory is not offered here; send the tensor itself")
        if raw:
            if tensor.HasField("contents"):
                raise bad(f"{tensor.name} has contents beside raw_input_contents")
            inputs.append(Given(tensor.name, tensor.datatype, shape, raw[number], None, parameters))
        else:
            inputs.append(Given(tensor.name, tensor.datatype, shape, None, _values(tensor), parameters))
    outputs = [
        Wanted(output.name, open_inference.classification_of(output.name, _parameters(output.parameters)))
        for output in request.outputs
    ]
    return Ask(inputs, outputs, _parameters(request.parameters))


def _values(tensor: Message) -> list[Any]:
    field = _CONTENTS.get(tensor.datatype)
    if field is None:
        raise bad(f"{tensor.name} is {tensor.datatype!r}, which contents cannot hold; send it as raw_input_contents")
    return list(getattr(tensor.contents, field))


def _parameters(given: Mapping[str, Message]) -> dict[str, Any]:
    return {name: getattr(value, value.WhichOneof("parameter_choice") or "bool_param") for name, value in given.items()}


def _response(request: Message, answered: Answered) -> Message:
    response = message("ModelInferResponse")(model_name=request.model_name, model_version=VERSION, id=request.id)
    for name, value in answered.made_by.items():
        setattr(response.parameters[name], "bool_param" if isinstance(value, bool) else "string_param", value)
    for result in answered.results:
        response.outputs.add(name=result.name, datatype=result.datatype, shape=result.shape)
        response.raw_output_contents.append(wire.to_bytes(result.data))
    return response
