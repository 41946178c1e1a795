"""The methods of `inference.GRPCInferenceService`: from messages to requests of the service, and back for answers.

Owns: the answer of each method, and the form of errors. `call` has the tensors in messages. Must not decide anything
that REST could decide otherwise.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any

from google.protobuf import json_format

from anychip_grpc.call import (
    GrpcInferCall,
    Message,
    RpcContext,
    serialized_response,
    serialized_stream_response,
)
from anychip_grpc.contents import RawRequest
from anychip_grpc.messages import SERVICE, message
from app.errors import ServiceError, invalid_request
from app.ingress.ingress import Ingress
from app.link import INLINE_BYTES
from app.protocols import signatures, triton

_INFER = f"/{SERVICE}/ModelInfer"
_ANSWER_BYTES = 64 * 2**20
"""Most bytes of tensors in one answer, unless requests may have more. grpcio copies each answer in the event loop and
blocks it: 0.2 to 1 ms a MiB, mostly the system's time for new pages of memory.
"""


class Methods:
    """Methods by their names in the protocol, lower-cased; anychip_grpc.server registers them."""

    def __init__(self, ingress: Ingress) -> None:
        self._link, self._administration, self._ingress = ingress.link, ingress.link.administration, ingress

    async def server_live(self, _request: Message, _context: RpcContext) -> Message:
        """Answer, as proof that the event loop does."""
        return message("ServerLiveResponse")(live=True)

    async def server_ready(self, _request: Message, _context: RpcContext) -> Message:
        """Report whether every model has a worker."""
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
        """Return name, version, extensions."""
        return _filled("ServerMetadataResponse", signatures.server_metadata())

    async def model_metadata(self, request: Message, _context: RpcContext) -> Message:
        """Return the model's inputs and outputs."""
        metadata = signatures.metadata(self._link, request.name, request.version)
        return _filled("ModelMetadataResponse", metadata)

    async def model_config(self, request: Message, _context: RpcContext) -> Message:
        """Return Triton's configuration of the model."""
        configuration = triton.configuration(self._link, request.name, request.version)
        return _filled("ModelConfigResponse", {"config": configuration})

    async def model_statistics(self, request: Message, _context: RpcContext) -> Message:
        """Return the statistics of one model, or of all."""
        statistics = triton.statistics(self._link, request.name, request.version)
        return _filled("ModelStatisticsResponse", {"model_stats": statistics})

    async def repository_index(self, request: Message, _context: RpcContext) -> Message:
        """Return every model with its state."""
        return _filled("RepositoryIndexResponse", {"models": triton.index(self._link, request.ready)})

    async def repository_model_load(self, request: Message, context: RpcContext) -> Message:
        """Load a model again."""
        triton.check_parameters(request.parameters)
        served = self._link.find(request.model_name)
        await self._administration.load(served.model.name)
        context.weights_sha256 = served.model.weights_sha256
        return message("RepositoryModelLoadResponse")()

    async def repository_model_unload(self, request: Message, _context: RpcContext) -> Message:
        """Unload a model."""
        triton.check_parameters(request.parameters)
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
        trailing = [("x-request-id", context.request_id), ("server-timing", context.recorder.timings())]
        if context.traceparent:
            trailing.append(("traceparent", context.traceparent.decode()))
        context.call.set_trailing_metadata(trailing)
        if response.data_bytes <= INLINE_BYTES:
            return serialized_response(request.message, call.version, response)
        return await self._ingress.offload(serialized_response, request.message, call.version, response)

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


def _filled(name: str, document: Mapping[str, Any]) -> Message:
    return json_format.ParseDict(document, message(name)(), ignore_unknown_fields=True)
