"""Innocent clients of the chaos run: each repeats one request over HTTP or gRPC, and knows its answer.

Owns: the requests, the comparison of an answer with the first one, the ledger of all requests. Must not know faults.
A request has exactly one answer: a connection brings the answers to the ids that were sent, in their order, and
nothing else; a call of gRPC ends once.
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
from urllib.parse import urlsplit

import grpc

from tests.support.grpc_client import arrays_of, image_request, method

IMAGES = Path(__file__).parents[2] / "models" / "sample" / "images"
SOURCE, FORWARDED_SOURCE = "127.0.0.2", "127.0.0.3"
"""Addresses of the innocent clients, so that they share no limit of one client (address) with others."""
STAGES, TILE = "shapes", 320
"""Model of two stages, and the side of the tiles of larger images."""
DEADLINE_S = 120.0
_PAUSE_S = 0.15
_CLOSE, _CLOSE_PIXELS = 0.02, 1.0
"""Allowed differences of scores and of boxes' corners between batches: rounding, which is no fault."""


class WrongAnswerError(Exception):
    """Answer that differs from the first one to the same request; the message says where."""


class LostError(Exception):
    """Request without its answer: an error, another request's answer, or none."""


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
    failing: bool = True
    """True while a failed request counts: until the service itself is told to end."""

    @contextlib.contextmanager
    def asking(self, client: str) -> Any:
        """Record a request from its first byte to its answer."""
        request = Request(client, time.monotonic())
        self.under_way.add(request)
        try:
            yield
            request.outcome = "ok"
        except WrongAnswerError as error:
            request.outcome, request.wrong = f"wrong: {error}", True
        except (LostError, OSError, asyncio.IncompleteReadError, grpc.RpcError, asyncio.TimeoutError) as error:
            request.outcome = f"lost: {type(error).__name__}: {error}"[:400]
        finally:
            request.ended_s = time.monotonic()
            self.under_way.discard(request)
            if request.outcome and (self.failing or request.outcome == "ok"):
                self.requests.append(request)
                self.answered[client] = self.answered.get(client, 0) + 1

    @property
    def bad(self) -> list[Request]:
        """Requests without their answer."""
        return [request for request in self.requests if request.outcome != "ok"]


def same(found: Any, first: Any, where: str = "the answer", close: float = _CLOSE) -> None:
    """Raise WrongAnswerError unless an answer is the same, up to rounding."""
    if isinstance(first, dict):
        if not isinstance(found, dict) or found.keys() != first.keys():
            raise WrongAnswerError(f"{where} has other fields")
        for name, value in first.items():
            same(found[name], value, f"{where}.{name}", _CLOSE_PIXELS if name in ("box", "boxes") else close)
    elif isinstance(first, list):
        if not isinstance(found, list) or len(found) != len(first):
            raise WrongAnswerError(f"{where} has another length")
        for index, (one, other) in enumerate(zip(found, first, strict=True)):
            same(one, other, f"{where}[{index}]", close)
    elif isinstance(first, float) and isinstance(found, int | float):
        if not abs(found - first) <= close:
            raise WrongAnswerError(f"{where} is {found}, and was {first}")
    elif found != first:
        raise WrongAnswerError(f"{where} is {found!r}, and was {first!r}"[:200])


class HttpConnection:
    """Keep-alive connection, opened again if it was closed between two requests."""

    def __init__(self, url: str, source: str = SOURCE) -> None:
        parts = urlsplit(url)
        self._host, self._port, self._source = parts.hostname, parts.port, source
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(
        self, path: str, body: bytes = b"", headers: dict[str, str] | None = None, method: str = "POST"
    ) -> tuple[int, dict[str, str], bytes]:
        """Return status, headers and body of the one answer. Raises LostError, OSError, IncompleteReadError."""
        if self._streams is not None and self._streams[0].at_eof():
            self.close()
        if self._streams is None:
            self._streams = await asyncio.open_connection(self._host, self._port, local_addr=(self._source, 0))
        reader, writer = self._streams
        request_id = f"chaos-{next(_NUMBERS)}"
        given = {"Host": "localhost", "X-Request-Id": request_id, "Content-Length": str(len(body)), **(headers or {})}
        head = "".join(f"{name}: {value}\r\n" for name, value in given.items())
        try:
            writer.write(f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + body)
            answer = await asyncio.wait_for(self._answer(reader), DEADLINE_S + 30)
        except BaseException:
            self.close()
            raise
        if answer[1].get("x-request-id") != request_id:
            self.close()
            raise LostError(f"the answer to {answer[1].get('x-request-id')} came for {request_id}")
        if answer[1].get("connection") == "close":
            self.close()
        return answer

    async def _answer(self, reader: asyncio.StreamReader) -> tuple[int, dict[str, str], bytes]:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        fields = (line.partition(":") for line in head[1:] if line)
        headers = {name.lower(): value.strip() for name, _, value in fields}
        body = await reader.readexactly(int(headers.get("content-length", "0")))
        return int(head[0].split()[1]), headers, body

    def close(self) -> None:
        """Close the connection; the next request opens another."""
        if self._streams is not None:
            self._streams[1].transport.abort()
            self._streams[1].close()
            self._streams = None


_NUMBERS = itertools.count(1)
Ask = Callable[[], Awaitable[Any]]
"""Function that sends one request, the same each time, and returns the part of its answer that must not change."""


def _read(*names: str) -> list[bytes]:
    return [(IMAGES / name).read_bytes() for name in names]


@contextlib.contextmanager
def http_clients(url: str) -> Iterator[dict[str, Ask]]:
    """Yield the clients by name; each has a connection that is closed at the end of the block."""
    connections: list[HttpConnection] = []

    def asking(path: str, body: bytes, kind: str, kept: Callable[[Any], Any], **headers: str) -> Ask:
        connection = HttpConnection(url)
        connections.append(connection)
        sent = {"Content-Type": kind, "X-Timeout-Ms": str(int(DEADLINE_S * 1e3)), **headers}

        async def ask() -> Any:
            status, answered, content = await connection.ask(path, body, sent)
            if status != 200:
                raise LostError(f"{status} {content[:300].decode(errors='replace')}")
            length = answered.get("inference-header-content-length")
            return kept(json.loads(content[: int(length)] if length else content))

        return ask

    def predictions(answer: Any) -> Any:
        return answer["predictions"]

    def outputs(answer: Any) -> Any:
        return {output["name"]: output["data"] for output in answer["outputs"] if output["datatype"] != "BYTES"}

    heart, ring, star = _read("classify_heart.jpg", "classify_ring.jpg", "classify_star.jpg")
    first, second, third = _read("detect_1.jpg", "detect_2.jpg", "detect_3.jpg")
    resnet, yolo = "/v1/models/resnet50:predict", "/v1/models/yolov8n:predict"
    several = [{"b64": base64.b64encode(image).decode()} for image in (first, second, third, second)]
    tensor = {"name": "image", "datatype": "BYTES", "shape": [1], "data": [base64.b64encode(star).decode()]}
    clients: dict[str, Ask] = {
        "HTTP, an image for a classifier": asking(resnet, heart, "image/jpeg", predictions),
        "HTTP, another image for it": asking(resnet, ring, "image/jpeg", predictions),
        "HTTP, an image for a detector": asking(yolo, first, "image/jpeg", predictions),
        "HTTP, a large JSON of images": asking(
            yolo, json.dumps({"instances": several}).encode(), "application/json", predictions
        ),
        "HTTP, an image as a tensor": asking(
            "/v2/models/resnet50/infer", json.dumps({"inputs": [tensor]}).encode(), "application/json", outputs
        ),
        "HTTP, an image in tiles": asking(f"{yolo}?tile={TILE}", second, "image/jpeg", predictions),
        "HTTP, two stages": asking(f"/v1/models/{STAGES}:predict", third, "image/jpeg", predictions),
    }
    try:
        yield clients
    finally:
        for connection in connections:
            connection.close()


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
