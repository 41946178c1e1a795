"""The methods of `inference.GRPCInferenceService`, and gRPC's own services: health checking and reflection.

Must not decide anything that REST could decide otherwise.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, TypeVar

from google.protobuf import json_format
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2

from anychip_grpc.messages import POOL, SERVICE, Message, RawRequest, field_head, message
from anychip_grpc.relay import address_in
from app import clock
from app.config import Settings
from app.errors import ServiceError, invalid_request
from app.ingress.budget import Lease
from app.ingress.context import Interruption, RequestContext
from app.ingress.inference import run
from app.ingress.ingress import Call, Ingress, Run
from app.link import INLINE_BYTES, Link, ServedModel, Terms
from app.observability.triton_statistics import of_version
from app.protocols import open_inference, signatures, wire
from app.protocols.options import CLASSIFICATION
from app.protocols.parameters import deadline_s, read, read_headers

CallContext = Any
"""grpc.aio.ServicerContext, which has no types."""

Answer = TypeVar("Answer")

HEALTH: Any = health_pb2.DESCRIPTOR.services_by_name["Health"]
REFLECTION: Any = reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"]
_HEALTH: Any = health_pb2.HealthCheckResponse
_WATCH_INTERVAL_S = 0.5
_REFLECTION_S = 60.0
_INFER = f"/{SERVICE}/ModelInfer"
_ANSWER_BYTES = 64 * 2**20
"""Most bytes of tensors in one answer, unless requests may have more. grpcio copies each answer in the event loop and
blocks it: 0.2 to 1 ms a MiB, mostly the system's time for new pages of memory.
"""


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


class GrpcInferCall(Call[wire.InferenceResponse]):
    """Call with a ModelInferRequest."""

    def __init__(self, context: RpcContext, request: RawRequest) -> None:
        self.context = context
        self.model, self.version = request.message.model_name, request.message.model_version
        self._request = request
        self._received_s = clock.monotonic()  # Deadlines count from here: gRPC says nothing of the first byte.
        remaining_s = context.call.time_remaining()
        self._ends_s = math.inf if remaining_s is None else clock.monotonic() + max(0.0, remaining_s)

    def terms(self, settings: Settings) -> Terms:
        """Return the terms: the metadata's deadline, else the call's own, else ours; none outlasts the call's own."""
        started_s = self._received_s
        timeout_ms, priority = read_headers(dict(self.context.scope["headers"]))
        usual_s = settings.timeout_ms / 1e3 if math.isinf(self._ends_s) else self._ends_s - started_s
        timeout_s = usual_s if timeout_ms is None else timeout_ms / 1e3
        return Terms(min(deadline_s(started_s, timeout_s), self._ends_s), priority, self.context.recorder)

    async def read(self, lease: Lease, limit: Interruption) -> None:
        """Read nothing more: the message has already been received, as it names the model (anychip_grpc.answering)."""

    async def prepare(
        self, ingress: Ingress, served: ServedModel, terms: Terms, lease: Lease
    ) -> Run[wire.InferenceResponse]:
        request = inference_request(*self._request)
        work = open_inference.prepare(ingress.link, served, request, terms, started_s=self._received_s, name=self.model)
        work.terms.deadline_s = min(work.terms.deadline_s, self._ends_s)
        return lambda: run(ingress, served, work)

    async def watched(self, run: Run[Answer], on_leave: Callable[[], None]) -> Answer:
        """Await the result. Only a client that has gone cancels a call; `on_leave` runs before the work ends."""
        computing = asyncio.ensure_future(run())
        try:
            return await asyncio.shield(computing)
        except asyncio.CancelledError:
            on_leave()
            computing.cancel()
            await asyncio.gather(computing, return_exceptions=True)
            raise


def inference_request(request: Message, contents: Sequence[wire.Buffer]) -> wire.InferenceRequest:
    """Convert a ModelInferRequest, whose inputs have these contents. Raises INVALID_REQUEST."""
    wire.checked_id(request.id)
    inputs = []
    for tensor, content in zip(request.inputs, contents, strict=True):
        shape = wire.checked_shape(tensor.name, list(tensor.shape))
        parameters = _parameters(tensor.parameters)
        if "shared_memory_region" in parameters:
            raise invalid_request("shared memory is not offered here; send the tensor itself")
        inputs.append(wire.InputTensor(tensor.name, tensor.datatype, shape, content, None, parameters))
    outputs = [
        wire.RequestedOutput(each.name, read(CLASSIFICATION, given := _parameters(each.parameters)), given)
        for each in request.outputs
    ]
    return wire.InferenceRequest(inputs, outputs, _parameters(request.parameters))


def _parameters(given: Mapping[str, Message]) -> dict[str, Any]:
    return {name: getattr(value, value.WhichOneof("parameter_choice") or "bool_param") for name, value in given.items()}


def serialized_response(request: Message, model: str, answered: wire.InferenceResponse) -> bytes:
    """Serialise the ModelInferResponse to a request that this model, with its version, has answered.

    May run in a thread: joining lets other threads run.
    """
    response = message("ModelInferResponse")(
        model_name=request.model_name, model_version=of_version(model)[1], id=request.id
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


class Methods:
    """Methods by their names in the protocol, lower-cased; anychip_grpc.server registers them."""

    def __init__(self, ingress: Ingress) -> None:
        self._link, self._administration, self._ingress = ingress.link, ingress.link.administration, ingress
        services = SERVICE, HEALTH.full_name, REFLECTION.full_name
        self._reflection = reflection.aio.ReflectionServicer(services, pool=POOL)

    async def server_live(self, _request: Message, _context: RpcContext) -> Message:
        """Answer, as proof that the event loop does."""
        return message("ServerLiveResponse")(live=True)

    async def server_ready(self, _request: Message, _context: RpcContext) -> Message:
        return message("ServerReadyResponse")(ready=not self._administration.why_not())

    async def model_ready(self, request: Message, _context: RpcContext) -> Message:
        """Report whether the model has a worker. An unknown one is not ready, as in Triton; clients ask for either."""
        try:
            self._link.find(request.name, request.version)
            reasons = [self._administration.why_not(name) for name in self._link.parts(request.name)]
        except ServiceError:
            return message("ModelReadyResponse")(ready=False)
        return message("ModelReadyResponse")(ready=not any(reasons))

    async def server_metadata(self, _request: Message, _context: RpcContext) -> Message:
        return _filled("ServerMetadataResponse", signatures.server_metadata())

    async def model_metadata(self, request: Message, _context: RpcContext) -> Message:
        metadata = signatures.metadata(self._link, request.name, request.version)
        return _filled("ModelMetadataResponse", metadata)

    async def model_config(self, request: Message, _context: RpcContext) -> Message:
        configuration = signatures.configuration(self._link, request.name, request.version)
        return _filled("ModelConfigResponse", {"config": configuration})

    async def model_statistics(self, request: Message, _context: RpcContext) -> Message:
        statistics = signatures.statistics(self._link, request.name, request.version)
        return _filled("ModelStatisticsResponse", {"model_stats": statistics})

    async def repository_index(self, request: Message, _context: RpcContext) -> Message:
        return _filled("RepositoryIndexResponse", {"models": signatures.index(self._link, request.ready)})

    async def repository_model_load(self, request: Message, context: RpcContext) -> Message:
        signatures.check_parameters(request.parameters)
        served = self._link.find(request.model_name)
        await self._administration.load(served.model.name)
        context.weights_sha256 = served.model.weights_sha256
        return message("RepositoryModelLoadResponse")()

    async def repository_model_unload(self, request: Message, _context: RpcContext) -> Message:
        signatures.check_parameters(request.parameters)
        await self._administration.unload(self._link.find(request.model_name).model.name)
        return message("RepositoryModelUnloadResponse")()

    async def model_infer(self, request: RawRequest, context: RpcContext) -> bytes:
        """Return a model's outputs for one input, serialised. Raises ServiceError; cancelled, it gives all back."""
        call = GrpcInferCall(context, request)
        response = await self._ingress.answer(call)
        most = max(_ANSWER_BYTES, self._link.settings.max_body_bytes)
        if response.data_bytes > most:
            raise invalid_request(
                f"the answer's {response.data_bytes} bytes are more than the {most} that gRPC sends at once here;"
                " send fewer images, ask for fewer outputs, or ask over REST"
            )
        trailing = [("x-request-id", context.request_id), ("server-timing", context.recorder.timings().decode())]
        if context.traceparent:
            trailing.append(("traceparent", context.traceparent.decode()))
        context.call.set_trailing_metadata(trailing)
        if response.data_bytes <= INLINE_BYTES:
            return serialized_response(request.message, context.model, response)
        return await self._ingress.offload(serialized_response, request.message, context.model, response)

    async def model_stream_infer(
        self, requests: AsyncIterator[RawRequest | ServiceError], stream: RpcContext
    ) -> AsyncIterator[Message | bytes]:
        """Yield one answer a request, in their order; a request that fails does not end the stream."""
        async for request in requests:
            with RpcContext(self._link, stream.call, _INFER) as context:
                context.caller = stream.caller
                try:
                    if isinstance(request, ServiceError):
                        raise request
                    response = await self.model_infer(request, context)
                    context.status = 200
                    if len(response) <= INLINE_BYTES:
                        answer: Message | bytes = serialized_stream_response(response)
                    else:
                        answer = await self._ingress.offload(serialized_stream_response, response)
                except ServiceError as error:
                    context.status = context.failure(error).status
                    answer = message("ModelStreamInferResponse")()
                    answer.error_message = error.message
                    answer.infer_response.id = "" if isinstance(request, ServiceError) else request.message.id
            yield answer

    def _health(self) -> Message:
        return _HEALTH(status=_HEALTH.NOT_SERVING if self._administration.why_not() else _HEALTH.SERVING)

    async def check(self, request: Message, _context: RpcContext) -> Message:
        """Return the health of the server ("") or the inference service: serving while every model has a worker."""
        if request.service not in ("", SERVICE):
            raise ServiceError("NOT_FOUND", f"there is no service {request.service!r} here")
        return self._health()

    async def watch(self, request: Message, _context: RpcContext) -> AsyncIterator[Message]:
        """Yield the present health, and each change."""
        last = None
        while True:
            health = self._health()
            if request.service not in ("", SERVICE):
                health = _HEALTH(status=_HEALTH.SERVICE_UNKNOWN)
            if health != last:
                last = health
                yield health
            await asyncio.sleep(_WATCH_INTERVAL_S)

    async def reflect(self, requests: AsyncIterator[Any], context: RpcContext) -> AsyncIterator[Message]:
        """Describe the services' messages, for tools that have no description.

        Raises DEADLINE_EXCEEDED after a minute: a stream keeps room for its next message.
        """
        with Interruption(deadline_s=clock.monotonic() + _REFLECTION_S):
            async for answer in self._reflection.ServerReflectionInfo(_readable(requests), context.call):
                yield answer


async def _readable(requests: AsyncIterator[Any]) -> AsyncIterator[Message]:
    async for request in requests:
        if isinstance(request, ServiceError):
            raise request
        yield request


def _filled(name: str, document: Mapping[str, Any]) -> Message:
    return json_format.ParseDict(document, message(name)(), ignore_unknown_fields=True)
