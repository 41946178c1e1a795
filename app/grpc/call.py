"""A request for a model as gRPC sees it: terms in metadata and the call's deadline, tensors in a message.

Owns: how tensors and parameters look in messages. Must not decide anything that REST could decide otherwise.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

from app.config import Settings
from app.errors import invalid_request
from app.grpc.contents import RawRequest, field_head
from app.grpc.messages import message
from app.grpc.relay import address_in
from app.ingress.budget import Lease
from app.ingress.context import RequestContext
from app.ingress.ingress import Call, Ingress, Run
from app.ingress.interrupt import interrupted_at
from app.link import ServedModel
from app.observability.triton_statistics import VERSION
from app.protocols import open_inference, wire
from app.protocols.open_inference import classification_of
from app.protocols.parameters import deadline_s, read_priority
from app.protocols.tensors import (
    InferenceRequest,
    InferenceResponse,
    InputTensor,
    RequestedOutput,
    checked_id,
    checked_shape,
)
from app.serving.terms import Terms

Message = Any
CallContext = Any
"""grpc.aio.ServicerContext, which has no types."""

Answer = TypeVar("Answer")


class GrpcInferCall(Call[InferenceResponse]):
    """A ModelInferRequest."""

    def __init__(self, context: RequestContext, request: RawRequest, call: CallContext) -> None:
        super().__init__(context, request.message.model_name, request.message.model_version)
        self._request, self._call = request, call
        remaining_s = call.time_remaining()
        self._ends_s = math.inf if remaining_s is None else time.monotonic() + max(0.0, remaining_s)

    def terms(self, settings: Settings) -> Terms:
        """The call's own deadline, at most ours; nothing in the request outlasts it."""
        metadata = {str(key): value for key, value in self._call.invocation_metadata() or ()}
        started_s = self.context.started_s
        timeout_s = settings.timeout_ms / 1e3 if math.isinf(self._ends_s) else self._ends_s - started_s
        priority = read_priority(metadata.get("x-priority"))
        return Terms(deadline_s(started_s, timeout_s), priority, self.context.recorder)

    async def read(self, lease: Lease, limit: interrupted_at) -> None:
        """Nothing more: the message has been received, as what it asks for stands in it (app.grpc.receiving)."""

    async def prepare(  # noqa: D102
        self, ingress: Ingress, served: ServedModel, terms: Terms, lease: Lease
    ) -> Run[InferenceResponse]:
        service = ingress.service
        request = inference_request(*self._request)
        work = open_inference.prepare(
            service, served, request, terms, started_s=self.context.started_s, name=self.model
        )
        work.terms.deadline_s = min(work.terms.deadline_s, self._ends_s)
        return lambda: open_inference.run(service, served, work)

    async def watched(self, running: Awaitable[Answer], on_leave: Callable[[], None]) -> Answer:
        """Only a client that has gone cancels a call: said before the work itself hears of it."""
        computing = asyncio.ensure_future(running)
        try:
            return await asyncio.shield(computing)
        except asyncio.CancelledError:
            on_leave()
            computing.cancel()
            await asyncio.gather(computing, return_exceptions=True)
            raise


def inference_request(request: Message, contents: Sequence[wire.Buffer]) -> InferenceRequest:
    """What a ModelInferRequest asks, whose inputs have these contents. Raises INVALID_REQUEST."""
    checked_id(request.id)
    inputs = []
    for tensor, content in zip(request.inputs, contents, strict=True):
        shape = checked_shape(tensor.name, list(tensor.shape))
        parameters = _parameters(tensor.parameters)
        if "shared_memory_region" in parameters:
            raise invalid_request("shared memory is not offered here; send the tensor itself")
        inputs.append(InputTensor(tensor.name, tensor.datatype, shape, content, None, parameters))
    outputs = [
        RequestedOutput(output.name, classification_of(output.name, _parameters(output.parameters)))
        for output in request.outputs
    ]
    return InferenceRequest(inputs, outputs, _parameters(request.parameters))


def _parameters(given: Mapping[str, Message]) -> dict[str, Any]:
    return {name: getattr(value, value.WhichOneof("parameter_choice") or "bool_param") for name, value in given.items()}


def serialized_response(request: Message, answered: InferenceResponse) -> bytes:
    """The ModelInferResponse to a request, serialised. May run in a thread: joining lets other threads run."""
    response = message("ModelInferResponse")(model_name=request.model_name, model_version=VERSION, id=request.id)
    for name, value in answered.made_by.items():
        setattr(response.parameters[name], "bool_param" if isinstance(value, bool) else "string_param", value)
    for output in answered.outputs:
        response.outputs.add(name=output.name, datatype=output.datatype, shape=output.shape)
    parts = [response.SerializeToString()]
    for output in answered.outputs:
        data = wire.to_bytes(output.data)
        parts += (field_head(response, "raw_output_contents", len(data)), data)
    return b"".join(parts)


def serialized_stream_response(response: bytes) -> bytes:
    """The ModelStreamInferResponse that holds a serialised ModelInferResponse."""
    holder = message("ModelStreamInferResponse")
    return b"".join((field_head(holder, "infer_response", len(response)), response))


def peer(call: CallContext) -> str:
    """The client's address without its port, as HTTP has it."""
    return address_in(call.peer())


def scope_of(call: CallContext, path: str) -> dict[str, Any]:
    """A call as app.ingress.context sees a request."""
    return {"type": "http", "method": "POST", "path": path, "headers": headers(call), "client": (peer(call), 0)}


def headers(call: CallContext) -> list[tuple[bytes, bytes]]:
    """A call's metadata in the form of headers, names in lower case as gRPC has them."""
    return [
        (key.encode(), value if isinstance(value, bytes) else value.encode("latin-1", "replace"))
        for key, value in call.invocation_metadata() or ()
    ]
