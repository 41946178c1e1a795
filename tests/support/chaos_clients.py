"""Innocent clients of the chaos run: each repeats one request over HTTP or gRPC, and knows its answer.

Owns: the requests, the comparison of an answer with the first one, the ledger of all requests. Must not know faults.
A request has exactly one answer, with its id.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import httpx

from tests.support.grpc_client import arrays_of, image_request, method
from tests.support.load import client_at

IMAGES = Path(__file__).parents[2] / "models" / "sample" / "images"
SOURCE, FORWARDED_SOURCE = "127.0.0.2", "127.0.0.3"
"""Addresses of the innocent clients, so that they share no limit of one client (address) with others."""
STAGES, TILE = "shapes", 320
"""Model of two stages, and the side of the tiles of larger images."""
DEADLINE_S = 120.0
_PAUSE_S = 0.15
_CLOSE, _CLOSE_PIXELS = 0.02, 1.0
"""Allowed differences of scores and of boxes' corners between batches: rounding, which is no fault."""
_NUMBERS = itertools.count(1)
Ask = Callable[[], Awaitable[Any]]
"""Function that sends one request, the same each time, and returns the part of its answer that must not change."""


class WrongAnswerError(Exception):
    """Answer that differs from the first one to the same request; the message says where."""


class LostError(Exception):
    """Request without its answer: an error, or another request's answer."""


@dataclass(eq=False)
class Request:
    """Request of an innocent client. Times are of time.monotonic(); `outcome`: "" while it is in flight, "ok", or
    what went wrong."""

    client: str
    began_s: float
    ended_s: float = 0.0
    outcome: str = ""
    wrong: bool = False


@dataclass
class Ledger:
    """Every request of every innocent client."""

    requests: list[Request] = field(default_factory=list)
    under_way: set[Request] = field(default_factory=set)
    answered: dict[str, int] = field(default_factory=dict)
    """Number of answers by client."""

    @contextlib.contextmanager
    def asking(self, client: str) -> Iterator[None]:
        """Record a request from its first byte to its answer."""
        request = Request(client, time.monotonic())
        self.under_way.add(request)
        try:
            yield
            request.outcome = "ok"
        except WrongAnswerError as error:
            request.outcome, request.wrong = f"wrong: {error}", True
        except (LostError, OSError, httpx.HTTPError, grpc.RpcError) as error:
            request.outcome = f"lost: {type(error).__name__}: {error}"[:400]
        finally:
            request.ended_s = time.monotonic()
            self.under_way.discard(request)
            if request.outcome:
                self.requests.append(request)
                self.answered[client] = self.answered.get(client, 0) + 1

    @property
    def bad(self) -> list[Request]:
        """Requests without their answer."""
        return [request for request in self.requests if request.outcome != "ok"]


def same(found: Any, first: Any, where: str = "the answer", close: float = _CLOSE) -> None:
    """Raise WrongAnswerError unless an answer is the same, up to rounding."""
    if isinstance(first, dict) and isinstance(found, dict) and found.keys() == first.keys():
        for name, value in first.items():
            same(found[name], value, f"{where}.{name}", _CLOSE_PIXELS if name in ("box", "boxes") else close)
    elif isinstance(first, list) and isinstance(found, list) and len(found) == len(first):
        for index, (one, other) in enumerate(zip(found, first, strict=True)):
            same(one, other, f"{where}[{index}]", close)
    elif isinstance(first, float) and isinstance(found, int | float):
        if not abs(found - first) <= close:
            raise WrongAnswerError(f"{where} is {found}, and was {first}")
    elif found != first:
        raise WrongAnswerError(f"{where} is {found!r}, and was {first!r}"[:200])


def _read(*names: str) -> list[bytes]:
    return [(IMAGES / name).read_bytes() for name in names]


@contextlib.asynccontextmanager
async def http_clients(url: str) -> AsyncIterator[dict[str, Ask]]:
    """Yield the clients by name; each has a connection that is closed at the end of the block."""

    async def asking(path: str, body: bytes, kind: str, kept: Callable[[Any], Any]) -> Ask:
        client = await stack.enter_async_context(client_at(url, SOURCE, timeout_s=DEADLINE_S + 30))
        headers = {"Content-Type": kind, "X-Timeout-Ms": str(int(DEADLINE_S * 1e3))}

        async def ask() -> Any:
            wanted = f"chaos-{next(_NUMBERS)}"
            answer = await client.post(path, content=body, headers={**headers, "X-Request-Id": wanted})
            if answer.status_code != 200 or answer.headers["x-request-id"] != wanted:
                raise LostError(f"{answer.status_code} to {answer.headers.get('x-request-id')}: {answer.text[:300]}")
            length = answer.headers.get("inference-header-content-length")
            return kept(json.loads(answer.content[: int(length)] if length else answer.content))

        return ask

    def predictions(answer: Any) -> Any:
        return answer["predictions"]

    def outputs(answer: Any) -> Any:
        return {output["name"]: output["data"] for output in answer["outputs"] if output["datatype"] != "BYTES"}

    heart, ring, star = _read("classify_heart.jpg", "classify_ring.jpg", "classify_star.jpg")
    first, second, third = _read("detect_1.jpg", "detect_2.jpg", "detect_3.jpg")
    resnet, yolo = "/v1/models/resnet50:predict", "/v1/models/yolov8n:predict"
    several = [{"b64": base64.b64encode(image).decode()} for image in (first, second, third, second)]
    instances = json.dumps({"instances": several}).encode()
    tensor = {"name": "image", "datatype": "BYTES", "shape": [1], "data": [base64.b64encode(star).decode()]}
    inputs = json.dumps({"inputs": [tensor]}).encode()
    wanted = {
        "HTTP, an image for a classifier": (resnet, heart, "image/jpeg", predictions),
        "HTTP, another image for it": (resnet, ring, "image/jpeg", predictions),
        "HTTP, an image for a detector": (yolo, first, "image/jpeg", predictions),
        "HTTP, a large JSON of images": (yolo, instances, "application/json", predictions),
        "HTTP, an image as a tensor": ("/v2/models/resnet50/infer", inputs, "application/json", outputs),
        "HTTP, an image in tiles": (f"{yolo}?tile={TILE}", second, "image/jpeg", predictions),
        "HTTP, two stages": (f"/v1/models/{STAGES}:predict", third, "image/jpeg", predictions),
    }
    async with contextlib.AsyncExitStack() as stack:
        yield {name: await asking(*request) for name, request in wanted.items()}


def grpc_clients(channel: grpc.aio.Channel) -> dict[str, Ask]:
    """Return the clients by name."""

    def kept(answer: Any, wanted: str) -> Any:
        if answer.id != wanted:
            raise LostError(f"the answer to {answer.id} came for {wanted}")
        return {name: array.tolist() for name, array in arrays_of(answer).items()}

    infer, stream = method(channel, "ModelInfer"), method(channel, "ModelStreamInfer")

    def unary(model: str, *images: bytes, **parameters: int) -> Ask:
        async def ask() -> Any:
            request = image_request(*images, model=model, id=f"chaos-{next(_NUMBERS)}")
            for name, value in parameters.items():
                request.parameters[name].int64_param = value
            return kept(await infer(request, timeout=DEADLINE_S), request.id)

        return ask

    def streamed(model: str, images: Sequence[bytes]) -> Ask:
        async def ask() -> Any:
            requests = [image_request(image, model=model, id=f"chaos-{next(_NUMBERS)}") for image in images]
            answers = [answer async for answer in stream(iter(requests), timeout=DEADLINE_S)]
            if len(answers) != len(requests) or any(answer.error_message for answer in answers):
                raise LostError(f"{len(answers)} answers: {[answer.error_message for answer in answers]}")
            by_id = {answer.infer_response.id: answer.infer_response for answer in answers}
            return [kept(by_id[request.id], request.id) for request in requests if request.id in by_id]

        return ask

    heart, ring = _read("classify_heart.jpg", "classify_ring.jpg")
    second, third = _read("detect_2.jpg", "detect_3.jpg")
    return {
        "gRPC, an image for a classifier": unary("resnet50", heart),
        "gRPC, two images for a detector": unary("yolov8n", second, third),
        "gRPC, a stream": streamed("resnet50", (heart, ring)),
        "gRPC, an image in tiles": unary("yolov8n", third, tile=TILE),
        "gRPC, two stages": unary(STAGES, second),
    }


@contextlib.asynccontextmanager
async def forwarded(port: int) -> AsyncIterator[str]:
    """Forward a port of the service from another client address, like a load balancer; yield its address."""

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with contextlib.suppress(OSError):
                while data := await reader.read(1 << 16):
                    writer.write(data)
                    await writer.drain()
        finally:
            writer.close()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            theirs = await asyncio.open_connection("127.0.0.1", port, local_addr=(FORWARDED_SOURCE, 0))
        except OSError:
            writer.close()
            return
        both = pump(reader, theirs[1]), pump(theirs[0], writer)
        pumping.extend(map(asyncio.create_task, both))

    pumping: list[asyncio.Task[None]] = []
    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    async with server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def run_client(name: str, ask: Ask, ledger: Ledger, stop: asyncio.Event) -> None:
    """Run one innocent client until `stop`; its last request is answered before this returns."""
    first: Any = None
    while not stop.is_set():
        with ledger.asking(name):
            answer = await ask()
            if first is None:
                first = answer
            same(answer, first)
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(stop.wait(), _PAUSE_S)
