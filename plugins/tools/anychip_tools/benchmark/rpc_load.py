"""Calls over gRPC, by the Open Inference Protocol, for the loops of benchmark.load. Needs the extra grpc."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from anychip_base.extras import how_to_install
from anychip_tools.benchmark.endpoints import Tensor
from anychip_tools.benchmark.load import Call, ClosedLoad, OpenLoad, closed_loop, open_loop
from app.arguments import CommandError

_OPTIONS = [("grpc.max_send_message_length", 1 << 30), ("grpc.max_receive_message_length", 1 << 30)]


class RpcTarget:
    """Model of a gRPC server. Raises CommandError if the packages are missing."""

    def __init__(self, address: str, model: str, key: str = "") -> None:
        try:
            import grpc.aio

            from anychip_grpc import messages
        except ImportError as error:
            raise CommandError(f"gRPC needs more packages ({error}): {how_to_install('grpc')}") from None
        self._grpc, self._messages = grpc, messages
        self._address, self._model = address, model
        self._metadata = (("authorization", f"Bearer {key}"),) if key else ()

    def described(self) -> list[Mapping[str, Any]]:
        """Ask the server for the model's inputs. Raises CommandError."""
        with self._grpc.insecure_channel(self._address, options=_OPTIONS) as channel:
            ask = self._method(channel, "ModelMetadata")
            request = self._messages.message("ModelMetadataRequest")(name=self._model)
            try:
                answer = ask(request, timeout=30, metadata=self._metadata)
            except self._grpc.RpcError as error:
                raise CommandError(
                    f"{self._address} does not say what {self._model} takes: {error.details()}"
                ) from None
        return [{"name": each.name, "datatype": each.datatype, "shape": list(each.shape)} for each in answer.inputs]

    async def closed_loop(self, tensors: Sequence[Tensor], calls: int, seconds: float) -> ClosedLoad:
        """Load by a closed loop."""
        async with self._calls(tensors) as call:
            return await closed_loop(call, calls, seconds)

    async def open_loop(
        self, tensors: Sequence[Tensor], due_s: Sequence[float], *, seconds: float, timeout_s: float
    ) -> OpenLoad:
        """Load by an open loop; wait for the last answers as long as they are in time."""
        async with self._calls(tensors) as call:
            return await open_loop(call, due_s, seconds=seconds, timeout_s=timeout_s, linger_s=timeout_s)

    @asynccontextmanager
    async def _calls(self, tensors: Sequence[Tensor]) -> AsyncIterator[Call]:
        """Open a channel; yield what sends the tensors once over it, and returns the name of the status."""
        request = self._messages.message("ModelInferRequest")(model_name=self._model)
        for each in tensors:
            request.inputs.add(name=each.name, datatype=each.datatype, shape=list(each.shape))
            request.raw_input_contents.append(each.content)
        async with self._grpc.aio.insecure_channel(self._address, options=_OPTIONS) as channel:
            infer = self._method(channel, "ModelInfer")

            async def call() -> str:
                try:
                    await infer(request, metadata=self._metadata)
                except self._grpc.aio.AioRpcError as error:
                    return str(error.code().name)
                return "OK"

            yield call

    def _method(self, channel: Any, name: str) -> Any:
        messages = self._messages
        descriptor = messages.METHODS[name]
        return channel.unary_unary(
            f"/{messages.SERVICE}/{name}",
            request_serializer=messages.message_of(descriptor.input_type).SerializeToString,
            response_deserializer=messages.message_of(descriptor.output_type).FromString,
        )
