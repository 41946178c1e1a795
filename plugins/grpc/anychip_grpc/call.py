"""A request for a model in gRPC's form: terms in metadata and the call's deadline, tensors in a message.

Owns: the form of tensors and parameters in messages. Must not decide anything that REST could decide otherwise.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

from anychip_grpc.contents import RawRequest, field_head
from anychip_grpc.messages import message
from anychip_grpc.relay import address_in
from app.config import Settings
from app.errors import invalid_request
from app.ingress.budget import Lease
from app.ingress.context import RequestContext
from app.ingress.inference import run
from app.ingress.ingress import Call, Ingress, Run
from app.ingress.interrupt import interrupted_at
from app.link import Link, ServedModel, Terms
from app.observability.triton_statistics import FIRST_VERSION
from app.protocols import open_inference, wire
from app.protocols.options import CLASSIFICATION, X_PRIORITY
from app.protocols.parameters import deadline_s, read, read_header
from app.protocols.tensors import (
    InferenceRequest,
    InferenceResponse,
    InputTensor,
    RequestedOutput,
    checked_id,
    checked_shape,
)

Message = Any
CallContext = Any
"""grpc.aio.ServicerContext, which has no types."""

Answer = TypeVar("Answer")


class RpcContext(RequestContext):
    """A call, or one message of a stream of requests: its metadata replace HTTP's headers, its path the route."""

    __slots__ = ("call",)

    def __init__(self, link: Link, call: CallContext, path: str) -> None:
        self.call = call
        headers = [
            (key.encode(), value if isinstance(value, bytes) else value.encode("latin-1", "replace"))
            for key, value in call.invocation_metadata() or ()
        ]
        client = address_in(call.peer()), 0
        super().__init__(link, {"type": "http", "method": "POST", "path": path, "headers": headers, "client": client})
        self.route = path


class GrpcInferCall(Call[InferenceResponse]):
    """Call with a ModelInferRequest."""

    def __init__(self, context: RpcContext, request: RawRequest) -> None:
        super().__init__(context, request.message.model_name, request.message.model_version)
        self._request = request
        self._received_s = time.monotonic()  # Deadlines count from here: gRPC says nothing of the first byte.
        remaining_s = context.call.time_remaining()
        self._ends_s = math.inf if remaining_s is None else time.monotonic() + max(0.0, remaining_s)

    def terms(self, settings: Settings) -> Terms:
        """Return the terms: the call's own deadline, at most ours; no part of the request outlasts it."""
        started_s = self._received_s
        timeout_s = settings.timeout_ms / 1e3 if math.isinf(self._ends_s) else self._ends_s - started_s
        priority = read_header(X_PRIORITY, dict(self.context.scope["headers"]))
        return Terms(deadline_s(started_s, timeout_s), priority, self.context.recorder)

    async def read(self, lease: Lease, limit: interrupted_at) -> None:
        """Read nothing more: the message has already been received, as it names the model (anychip_grpc.receiving)."""

    async def prepare(  # noqa: D102
        self, ingress: Ingress, served: ServedModel, terms: Terms, lease: Lease
    ) -> Run[InferenceResponse]:
        request = inference_request(*self._request)
        work = open_inference.prepare(ingress.link, served, request, terms, started_s=self._received_s, name=self.model)
        work.terms.deadline_s = min(work.terms.deadline_s, self._ends_s)
        return lambda: run(ingress, served, work)

    async def watched(self, running: Awaitable[Answer], on_leave: Callable[[], None]) -> Answer:
        """Await the result. Only a client that has gone cancels a call; `on_leave` runs before the work ends."""
        computing = asyncio.ensure_future(running)
        try:
            return await asyncio.shield(computing)
        except asyncio.CancelledError:
            on_leave()
            computing.cancel()
            await asyncio.gather(computing, return_exceptions=True)
            raise


def inference_request(request: Message, contents: Sequence[wire.Buffer]) -> InferenceRequest:
    """Convert a ModelInferRequest, whose inputs have these contents. Raises INVALID_REQUEST."""
    checked_id(request.id)
    inputs = []
    for tensor, content in zip(request.inputs, contents, strict=True):
        shape = checked_shape(tensor.name, list(tensor.shape))
        parameters = _parameters(tensor.parameters)
        if "shared_memory_region" in parameters:
            raise invalid_request("shared memory is not offered here; send the tensor itself")
        inputs.append(InputTensor(tensor.name, tensor.datatype, shape, content, None, parameters))
    outputs = [
        RequestedOutput(output.name, read(CLASSIFICATION, _parameters(output.parameters))) for output in request.outputs
    ]
    return InferenceRequest(inputs, outputs, _parameters(request.parameters))


def _parameters(given: Mapping[str, Message]) -> dict[str, Any]:
    return {name: getattr(value, value.WhichOneof("parameter_choice") or "bool_param") for name, value in given.items()}


def serialized_response(request: Message, version: str, answered: InferenceResponse) -> bytes:
    """Serialise the ModelInferResponse to a request that this version of its model has answered.

    May run in a thread: joining lets other threads run.
    """
    response = message("ModelInferResponse")(
        model_name=request.model_name, model_version=version or FIRST_VERSION, id=request.id
    )
    for name, value in answered.made_by.items():
        setattr(response.parameters[name], "bool_param" if isinstance(value, bool) else "string_param", value)
    for output in answered.outputs:
        response.outputs.add(name=output.name, datatype=output.datatype, shape=output.shape)
    parts = [response.SerializeToString()]
    for output in answered.outputs:
        data = wire.content_of(output.data)
        parts += (field_head(response, "raw_output_contents", len(data)), *wire.pieces(data))
    return b"".join(parts)


def serialized_stream_response(response: bytes) -> bytes:
    """Serialise a ModelStreamInferResponse around a serialised ModelInferResponse."""
    holder = message("ModelStreamInferResponse")
    return b"".join((field_head(holder, "infer_response", len(response)), response))
