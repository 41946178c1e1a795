"""Offending clients of the chaos run: they send bad or expensive requests, stop in the middle, leave, or flood.

Owns: their requests, and the answers they may get. Must not know what becomes of the innocent. They come from
their own addresses, as the limits hold for each client. Each refused request has an answer that says why: 4xx, 429 or
503; never 500, never a closed connection without a word (except for requests that are not HTTP at all). What each of
many wrong requests is answered is asserted elsewhere (tests/service/test_http.py, test_limits.py): here are kinds that
cost different parts of the service something.
"""

from __future__ import annotations

import asyncio
import base64
import collections
import contextlib
import io
import json
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from urllib.parse import urlsplit

import grpc
import httpx
from PIL import Image

from anychip_grpc.messages import SERVICE, message
from tests.support.chaos_clients import IMAGES
from tests.support.load import WAIT_S, client_at

SOURCE = "127.0.0.66"
_PREDICT, _INFER = "/v1/models/resnet50:predict", "/v2/models/resnet50/infer"
_IMAGE = (IMAGES / "detect_2.jpg").read_bytes()
ADMIN = [
    ("POST", "/v1/devices/cpu:0:release"),
    ("POST", "/v2/repository/index"),
    ("GET", "/v1/models"),
    ("GET", "/v1/devices"),
    ("GET", "/v1/stats"),
    ("GET", "/metrics"),
    ("GET", "/v2/models/stats"),
    ("GET", "/v2/models/yolov8n"),
    ("GET", "/v2/models/yolov8n/ready"),
    ("GET", "/v2/health/live"),
    ("GET", "/openapi.json"),
    ("GET", "/"),
]


def _webp() -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", (5000, 5000), "#336699").save(stream, "WEBP")
    return stream.getvalue()


def _instances(content: bytes, count: int = 1) -> bytes:
    return json.dumps({"instances": [{"b64": base64.b64encode(content).decode()}] * count}).encode()


_J, _IMG = {"Content-Type": "application/json"}, {"Content-Type": "image/jpeg"}
_FORM = {"Content-Type": "multipart/form-data; boundary=b"}
_NUMBERS = b'{"inputs": [{"name": "pixels", "datatype": "UINT8", "shape": [61, 224, 224, 3], "data": ['

BAD_HTTP: dict[str, Callable[[], tuple[str, bytes, dict[str, str]]]] = {
    "no image": lambda: (_PREDICT, b"no image at all", _IMG),
    "half an image": lambda: (_PREDICT, _IMAGE[:20_000], _IMG),
    "WebP of 25 megapixels": lambda: (_PREDICT, _webp(), _IMG),
    "deep JSON": lambda: (_INFER, b'{"inputs":' + b"[" * 100_000, _J),
    "base64 of 13 MB": lambda: (_PREDICT, _instances(random.Random(0).randbytes(10_000_000)), _J),
    "500,000 instances": lambda: (_PREDICT, _instances(b"abcd", 500_000), _J),
    "9 million numbers of a wrong shape": lambda: (_INFER, _NUMBERS + b"7," * 9_000_000 + b"7]}]}", _J),
    "two million parts": lambda: (_PREDICT, b"--b\r\n" + b"\r\n--b\r\n" * 2_000_000, _FORM),
    "a body of 30 MB": lambda: (_PREDICT, bytes(30_000_000), _IMG),
    "a threshold of 0 for 8 images": lambda: (
        "/v1/models/yolov8n:predict?score_threshold=0&max_detections=3000",
        _instances(_IMAGE, 8),
        _J,
    ),
    "a model that is none": lambda: ("/v1/models/nobody:predict", b"x", _IMG),
}

_HEAD = f"POST {_PREDICT} HTTP/1.1\r\nhost: localhost\r\ncontent-type: image/jpeg\r\n"
RAW: dict[str, bytes] = {
    "a head of 8 MB": b"GET / HTTP/1.1\r\nhost: localhost\r\na: " + b"b" * 8_000_000,
    "2,000 headers": b"GET / HTTP/1.1\r\n" + b"a:b\r\n" * 2000 + b"\r\n",
    "trailers of 8 MB": f"{_HEAD}transfer-encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n".encode() + b"a: b\r\n" * 1_300_000,
    "no HTTP": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 10,
}
"""Bytes that no client library would send. Each is answered, or its connection closed."""


def bad_messages() -> dict[str, bytes]:
    """Make bytes that are no ModelInferRequests, or large ones."""
    infer = bytes(message("ModelInferRequest")(model_name="resnet50").SerializeToString())
    return {
        "400,000 inputs": infer + b"\x2a\x00" * 400_000,
        "400,000 raw contents": infer + b"\x3a\x00" * 400_000,
        "no message": b"\xff" * 100_000,
    }


async def _status(reader: asyncio.StreamReader) -> str:
    """Return the status of the answer, or "closed"."""
    with contextlib.suppress(OSError):
        line = await asyncio.wait_for(reader.readline(), WAIT_S)
        return line.decode("latin-1").split(" ")[1] if line else "closed"
    return "closed"


class Offenders:
    """Offending clients. `answers`: counts of answers by kind of request; `unfair`: answers that must not occur."""

    def __init__(self, url: str, grpc_address: str, seed: int) -> None:
        self.answers: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
        self.unfair: list[str] = []
        self._url, self._grpc = url, grpc_address
        parts = urlsplit(url)
        self._address = parts.hostname, parts.port
        self._chance = random.Random(seed)
        self.all: dict[str, Callable[[], Awaitable[None]]] = {
            "bad input over HTTP": self.bad_http,
            "bad input, no client library's": self.raw,
            "bad input over gRPC": self.bad_grpc,
            "clients leave": self.leaving,
            "slow uploads": self.slow_uploads,
            "heads that stop": self.half_open,
            "flood of admin routes": self.admin_flood,
        }

    def _count(self, what: str, answer: str, *fair: str) -> None:
        self.answers[what][answer] += 1
        if not answer.startswith(fair):
            self.unfair.append(f"{what}: {answer}")

    @contextlib.asynccontextmanager
    async def _open(self) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        """Open a connection; abort it at the end of the block."""
        reader, writer = await asyncio.open_connection(*self._address, local_addr=(SOURCE, 0))
        try:
            yield reader, writer
        finally:
            writer.transport.abort()

    async def bad_http(self) -> None:
        """Send each kind once, one after the other, in any order."""
        async with client_at(self._url, SOURCE) as client:
            for what in self._chance.sample(list(BAD_HTTP), len(BAD_HTTP)):
                path, body, headers = await asyncio.to_thread(BAD_HTTP[what])
                try:
                    answer = await client.post(path, content=body, headers=headers)
                    found = f"{answer.status_code} {answer.json()['code']}" if answer.status_code != 200 else "200"
                except httpx.HTTPError as error:
                    found = type(error).__name__
                self._count(what, found, "4", "200", "503", "504")

    async def raw(self) -> None:
        """Send each kind once."""
        for what, data in RAW.items():
            async with self._open() as (reader, writer):
                with contextlib.suppress(OSError):
                    writer.write(data)
                    await asyncio.wait_for(writer.drain(), WAIT_S)
                self._count(what, await _status(reader), "4", "closed")

    async def bad_grpc(self) -> None:
        """Send each kind three times at once, one kind after the other."""
        options = [("grpc.max_send_message_length", -1)]
        async with grpc.aio.insecure_channel(self._grpc, options) as channel:
            infer = channel.unary_unary(f"/{SERVICE}/ModelInfer")
            for what, data in (await asyncio.to_thread(bad_messages)).items():
                calls = [infer(data, timeout=WAIT_S) for _ in range(3)]
                for code in await asyncio.gather(*(call.code() for call in calls)):
                    self._count(f"gRPC: {what}", code.name, "INVALID_ARGUMENT", "RESOURCE_EXHAUSTED")

    async def leaving(self) -> None:
        """Run clients that send all, or a part, and leave at any moment."""

        async def one(leave_s: float, part: float) -> None:
            async with self._open() as (_, writer):
                body = _IMAGE[: int(len(_IMAGE) * part)]
                writer.write(f"{_HEAD}content-length: {len(_IMAGE)}\r\n\r\n".encode() + body)
                await asyncio.sleep(leave_s)

        chance = self._chance
        await asyncio.gather(*(one(chance.random() * 0.3, chance.choice((0.5, 1.0, 1.0))) for _ in range(20)))
        self.answers["clients that left"]["-"] += 20

    async def slow_uploads(self) -> None:
        """Upload a few bytes a second: refused for their rate."""

        async def one() -> None:
            async with self._open() as (reader, writer):
                writer.write(f"{_HEAD}content-length: 1000000\r\n\r\n".encode())
                answer = asyncio.create_task(_status(reader))
                while not answer.done():
                    with contextlib.suppress(OSError):
                        writer.write(b"x" * 10)
                    await asyncio.wait((answer,), timeout=0.5)
            # Closed: it wrote on after the answer, and a reset dropped the answer; this happens on a busy machine.
            self._count("slow uploads", answer.result(), "408", "closed")

        await asyncio.gather(*(one() for _ in range(10)))

    async def half_open(self) -> None:
        """Open connections whose head never ends."""

        async def one(size: int) -> None:
            async with self._open() as (reader, writer):
                writer.write(b"GET / HTTP/1.1\r\nhost: localhost\r\n"[:size])
                self._count("heads that stop", await _status(reader), "408", "closed")

        await asyncio.gather(*(one(size % 25) for size in range(50)))

    async def admin_flood(self) -> None:
        """Ask every route beside inference, twenty times each, all at once."""
        async with client_at(self._url, SOURCE, connections=200) as client:

            async def one(method: str, path: str) -> None:
                try:
                    found = str((await client.request(method, path)).status_code)
                except httpx.HTTPError as error:
                    found = type(error).__name__
                # Without its worker a model is not ready, and its device is missing.
                self._count(f"{method} {path}", found, "200", "503", "404")

            await asyncio.gather(*(one(*route) for route in ADMIN * 20))
