"""Load over gRPC, by the Open Inference Protocol: closed and open loop, like benchmark.load for HTTP.

Owns: the calls and their times. Needs the extra grpc.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

from anychip_base.extras import how_to_install
from anychip_tools.benchmark.endpoints import Tensor
from anychip_tools.benchmark.load import Accepted, ClosedLoad, OpenLoad
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
        """Keep `calls` calls in flight; begin the next one when one is answered."""
        load, request = ClosedLoad(), self._request(tensors)
        async with self._grpc.aio.insecure_channel(self._address, options=_OPTIONS) as channel:
            infer = self._method(channel, "ModelInfer")
            started_s = time.perf_counter()

            async def one() -> None:
                while (begun_s := time.perf_counter()) < started_s + seconds:
                    status = await self._status(infer, request)
                    if status:
                        load.errors[status] = load.errors.get(status, 0) + 1
                    else:
                        load.latencies_s.append(time.perf_counter() - begun_s)

            await asyncio.gather(*(one() for _ in range(calls)))
            load.seconds = time.perf_counter() - started_s
        return load

    async def open_loop(
        self, tensors: Sequence[Tensor], due_s: Sequence[float], *, seconds: float, timeout_s: float
    ) -> OpenLoad:
        """Call at each of `due_s`, even if earlier calls are unanswered."""
        load, request = OpenLoad(timeout_s, seconds), self._request(tensors)
        async with self._grpc.aio.insecure_channel(self._address, options=_OPTIONS) as channel:
            infer = self._method(channel, "ModelInfer")
            started_s = time.perf_counter()

            async def one(due: float) -> None:
                load.lateness_s.append(time.perf_counter() - started_s - due)
                status = await self._status(infer, request)
                now_s = time.perf_counter() - started_s
                if status:
                    load.refused[status] += 1
                else:
                    load.accepted.append(Accepted(now_s, now_s - due))

            tasks = []
            for due in due_s:
                await asyncio.sleep(max(0.0, started_s + due - time.perf_counter()))
                load.sent += 1
                tasks.append(asyncio.create_task(one(due)))
            if tasks:
                _, left = await asyncio.wait(tasks, timeout=timeout_s)
                for task in left:
                    task.cancel()
                load.unanswered = len(left)
                await asyncio.gather(*left, return_exceptions=True)
        return load

    def _method(self, channel: Any, name: str) -> Any:
        messages = self._messages
        descriptor = messages.METHODS[name]
        return channel.unary_unary(
            f"/{messages.SERVICE}/{name}",
            request_serializer=messages.message_of(descriptor.input_type).SerializeToString,
            response_deserializer=messages.message_of(descriptor.output_type).FromString,
        )

    def _request(self, tensors: Sequence[Tensor]) -> Any:
        request = self._messages.message("ModelInferRequest")(model_name=self._model)
        for each in tensors:
            request.inputs.add(name=each.name, datatype=each.datatype, shape=list(each.shape))
            request.raw_input_contents.append(each.content)
        return request

    async def _status(self, infer: Any, request: Any) -> str:
        """Call once; return the name of the error's status, or ""."""
        try:
            await infer(request, metadata=self._metadata)
        except self._grpc.aio.AioRpcError as error:
            return str(error.code().name)
        return ""
