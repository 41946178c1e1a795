"""A request for a model and its answer as HTTP sees them: headers, a body in pieces, a client that may leave.

Owns: the parts that all such requests and answers share, whichever server has read the head; and the forms of a body
that holds images, their limits and their error messages. Must not know models' insides or scheduling.
"""

from __future__ import annotations

import asyncio
import contextlib
import zlib
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

import orjson
from fastapi import Response
from starlette.datastructures import Headers, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request
from starlette.types import Receive, Scope

from app.config import Settings
from app.errors import ClientLeftError, ServiceError, error_body, invalid_request
from app.images.header import has_lost_bytes
from app.ingress.budget import Lease
from app.ingress.context import Interruption, RequestContext
from app.ingress.converter import Converter
from app.ingress.ingress import Call, Ingress, Run
from app.link import Encoded, Link, ServedModel, Terms
from app.protocols.documents import packed_instances, read_instances, unpack
from app.protocols.options import OVERLAP, QUERY, TILE, TIMEOUT_MS, check_names
from app.protocols.parameters import deadline_s, pairs_of, read, read_headers, read_options
from models import Options
from models.tasks.tiles import Tiling

Header = tuple[bytes, bytes]
Content = tuple[bytes | memoryview, list[Header]]
"""A body, and the headers that describe it."""


def as_json(document: Any) -> Content:
    """Write a document as an answer's content."""
    return _of_json(orjson.dumps(document))


def _of_json(body: bytes) -> Content:
    return body, [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]


async def as_large_json(ingress: Ingress, entries: Sequence[Any], before: bytes = b"", after: bytes = b"") -> Content:
    """Write a list as an answer's content, between `before` and `after`: 64 vectors or maps may take 90 MB of text.

    A thread writes each entry and joins them all: no piece holds the interpreter for long.
    """
    parts = [before, b"["]
    for each in entries:
        parts += [await ingress.offload(orjson.dumps, each), b","]
    parts[-1:] = [b"]", after]
    return _of_json(await ingress.offload(b"".join, parts))


def as_response(content: Content) -> Response:
    """Make the framework's response of a good answer."""
    body, headers = content
    response = Response(body)
    response.raw_headers[:] = headers
    return response


def error_content(error: ServiceError, context: RequestContext) -> Content:
    """Write the content of the answer that says what went wrong."""
    body, headers = as_json(error_body(error.code, error.message, context.request_id))
    headers += error.headers
    if error.retry_after_s is not None:
        headers.append((b"retry-after", b"%d" % error.retry_after_s))
    return body, headers


def common_headers(link: Link, context: RequestContext) -> list[Header]:
    """Return the headers that every answer has. To be called when the answer begins."""
    headers = [
        (b"x-request-id", context.request_id.encode()),
        (b"server-timing", context.recorder.timings()),
    ]
    if context.traceparent:
        headers.append((b"traceparent", context.traceparent))
    if link.administration.draining:
        # The client's next request then comes on a new connection, which another service may accept.
        headers.append((b"connection", b"close"))
    return headers


Answer = TypeVar("Answer")

LENGTH_DIGITS = 18
"""Most digits of a length that is read. Python refuses to read thousands, which a client may send."""
_LEAST_UPLOAD_BYTES_PER_S = 4096
"""Least speed of an upload after its first five seconds; slower ones are refused."""
_MOST_FILES = 16
_LEAST_IMAGE_BYTES = 32

Fields = Mapping[bytes, bytes]
"""Headers of a request, names in lower case; of several with one name the last."""

Body = bytes | bytearray

_RAW = "application/octet-stream"
_FORM = "application/x-www-form-urlencoded"
_UNSAID = ("", _RAW, _FORM)
"""Content types of clients that set none: libraries none or bytes, `curl --data-binary` and urllib a form's type."""
_JSON_INLINE_BYTES = 256 * 1024
"""Largest JSON, mostly base64, that the event loop reads; another process reads larger ones."""
_PIECE_BYTES = 1024 * 1024
"""Bytes of a form searched and parsed at a time, in some 5 ms at most; the event loop runs others in between."""
_END_BYTES = 4096
"""Bytes at a form's end among which its closing boundary is sought."""
WINDOW = {"gzip": 31, "deflate": 15}
"""Encodings of a body, and zlib's numbers for them."""


def inflated(encoding: str, body: Body, most: int) -> bytes:
    """Remove a body's Content-Encoding, to at most `most` bytes; runs in a thread.

    Raises UNSUPPORTED_MEDIA_TYPE, BODY_TOO_LARGE, INVALID_REQUEST.
    """
    if encoding not in WINDOW:
        message = f"content encoding {encoding!r} is not read here; send gzip, deflate or none"
        raise ServiceError("UNSUPPORTED_MEDIA_TYPE", message)
    inflater = zlib.decompressobj(WINDOW[encoding])
    try:
        inflated = inflater.decompress(body, most + 1)
    except zlib.error:
        raise invalid_request(f"the body is no {encoding}") from None
    if len(inflated) > most:
        raise ServiceError("BODY_TOO_LARGE", f"inflated, the body is larger than the {most} bytes that are read here")
    if not inflater.eof or inflater.unused_data:
        raise invalid_request(f"the {encoding} of the body {'goes on after its end' if inflater.eof else 'ends early'}")
    return inflated


async def read_images(
    headers: Fields, body: Body, max_images: int, converter: Converter, lease: Lease, *, any_type: bool = False
) -> list[Encoded]:
    """Return the encoded images of a body in any of the three forms, in order, at least one.

    The first bytes decide if the content type says nothing of images, forms or JSON. `any_type`: a body that claims to
    be neither form nor JSON is an image, whatever its type, and a form's other fields are ignored. Raises
    INVALID_REQUEST, UNSUPPORTED_MEDIA_TYPE.
    """
    content_type = headers.get(b"content-type", b"").decode("latin-1")
    kind = content_type.partition(";")[0].strip().lower()
    if not body:
        raise invalid_request("the body is empty; send an image, multipart/form-data or JSON")
    encoded: list[Encoded]
    if kind in _UNSAID:
        if kind == _FORM and has_lost_bytes(body):
            raise invalid_request("the body has lost its zeros and line ends, as curl -d sends it: use --data-binary")
        kind = _kind_of(bytes(body[:64]), kind)
    if kind.startswith("image/") or kind == _RAW:
        encoded = [body]
    elif kind == "multipart/form-data":
        encoded = await _multipart(content_type, body, max_images, any_field=any_type)
    elif kind == "application/json":
        if len(body) <= _JSON_INLINE_BYTES:
            encoded = [*read_instances(body, max_images)]
        else:
            converted = await converter.convert(packed_instances, max_images, body)
            lease.take(len(converted))
            encoded = unpack(converted)[1]
    elif any_type:
        encoded = [body]
    else:
        raise ServiceError(
            "UNSUPPORTED_MEDIA_TYPE",
            f"content type {kind!r} is not read here; send image/jpeg, {_RAW}, multipart/form-data or application/json",
        )
    if len(encoded) > max_images:
        raise invalid_request(f"{len(encoded)} images are more than the {max_images} a request may hold")
    for index, data in enumerate(encoded):
        if not data:
            raise invalid_request(f"image {index} is empty")
    return encoded


def _kind_of(begin: bytes, stated: str) -> str:
    """Return the content type of a body by its beginning. Text stays what it is said to be; all else is an image."""
    if begin.lstrip()[:1] == b"{":
        return "application/json"
    is_text = all(0x20 <= byte < 0x7F for byte in begin)
    return stated if stated and is_text else _RAW


async def _multipart(content_type: str, body: Body, max_images: int, *, any_field: bool) -> list[Encoded]:
    single = await _single_part(content_type, body)
    if single is not None:
        return [single]
    async with _form(content_type, body, max_images + 1) as parts:
        files = [part for _, part in parts if isinstance(part, UploadFile)]
        fields = [(name, part) for name, part in parts if isinstance(part, str)]
        name, text = max(fields, key=lambda field: len(field[1]), default=("", ""))
        if len(text) > _LEAST_IMAGE_BYTES and not (files and any_field):
            raise invalid_request(
                f"the part {name[:64]!r} of the multipart body has no filename, so that it is no file; "
                "send one with -F file=@cat.jpg"
            )
        if not files:
            raise invalid_request("the multipart body holds no complete file; send one with -F file=@cat.jpg")
        if fields and not any_field:
            raise invalid_request(f"the form's field {name[:64]!r} is not read here; parameters belong in the query")
        if len(files) > max_images:
            raise invalid_request(f"a request may hold {max_images} images, this one holds more")
        if not body[-_END_BYTES:].rstrip().endswith(b"--"):
            raise invalid_request("the multipart body ends before its closing boundary")
        return [await file.read() for file in files]


async def read_form(headers: Fields, body: Body) -> tuple[dict[str, str], dict[str, bytes]]:
    """Return the fields of a multipart form, and its files, by name. Raises INVALID_REQUEST, UNSUPPORTED_MEDIA_TYPE."""
    content_type = headers.get(b"content-type", b"").decode("latin-1")
    if content_type.partition(";")[0].strip().lower() != "multipart/form-data":
        raise ServiceError("UNSUPPORTED_MEDIA_TYPE", "send multipart/form-data")
    async with _form(content_type, body, _MOST_FILES) as parts:
        fields = {name: part for name, part in parts if isinstance(part, str)}
        files = {name: await part.read() for name, part in parts if isinstance(part, UploadFile)}
    return fields, files


@contextlib.asynccontextmanager
async def _form(content_type: str, body: Body, max_files: int) -> AsyncIterator[list[tuple[str, UploadFile | str]]]:
    """Open the parts of a form for as long as the context. Raises INVALID_REQUEST."""

    async def stream() -> AsyncGenerator[bytes, None]:
        view = memoryview(body)
        for start in range(0, len(view), _PIECE_BYTES):
            if start:
                await asyncio.sleep(0)
            yield bytes(view[start : start + _PIECE_BYTES])

    headers = Headers({"content-type": content_type})
    parser = MultiPartParser(headers, stream(), max_files=max_files, max_fields=100)
    # All of the body is in memory already: a second copy in a temporary file would be slower and could fail.
    parser.spool_max_size = len(body) + 1
    try:
        try:
            form = await parser.parse()
        except MultiPartException as error:
            unnamed = ": a part of this size needs a filename" if "maximum size" in error.message else ""
            raise invalid_request(f"the multipart body is malformed: {error.message.rstrip('.')}{unnamed}") from None
        except (KeyError, ValueError, AttributeError):  # The parser's errors for a boundary it cannot read.
            raise invalid_request("the multipart body is malformed: no readable boundary") from None
        yield form.multi_items()
    finally:
        # All of them: a part without an end is in no form, and would stay open.
        for begun in parser._files_to_close_on_error:
            begun.close()


async def _single_part(content_type: str, body: Body) -> memoryview | None:
    """Return the one file of a body with one part, without parsing or copying it; None if it looks any different.

    Parsing costs more than receiving: 2.6 ms against 0.6 ms for 1.5 MB.
    """
    _, separator, boundary = content_type.partition("boundary=")
    boundary = boundary.partition(";")[0].strip().strip('"')
    if not separator or not boundary:
        return None
    opening = b"--" + boundary.encode("latin-1", "replace") + b"\r\n"
    closing = b"\r\n" + opening[:-2] + b"--"
    head_end = body.find(b"\r\n\r\n", 0, 4096)
    last = body.rfind(closing, max(0, len(body) - _END_BYTES))
    if not body.startswith(opening) or head_end < 0 or last < head_end + 4 or body[last + len(closing) :].strip():
        return None
    head = body[len(opening) : head_end].lower()
    if b"filename=" not in head or b"content-transfer-encoding" in head:
        return None
    following = b"\r\n" + opening
    for start in range(head_end, last, _PIECE_BYTES):
        if start > head_end:
            await asyncio.sleep(0)
        if body.find(following, start, start + _PIECE_BYTES + len(following) - 1) >= 0:
            return None
    return memoryview(body)[head_end + 4 : last]


def read_query(query: bytes, *, any_name: bool = False) -> tuple[Options, float | None, Tiling | None]:
    """Read options, `timeout_ms` and `tile` with `overlap` of a query string; None: not given.

    Raises INVALID_REQUEST, also for other names and repeated ones, unless `any_name` ignores them.
    """
    pairs = pairs_of(query)
    names, known = [name for name, _ in pairs], [row.name for row in QUERY]
    check_names(names, QUERY)
    for name in () if any_name else names:
        if name not in known:
            raise invalid_request(f"there is no parameter {name[:64]!r} here; there is {', '.join(known)}")
        if names.count(name) > 1:
            raise invalid_request(f"{name} is given more than once")
    given = dict(pairs)
    tile, overlap = read(TILE, given), read(OVERLAP, given)
    if tile is None and overlap != OVERLAP.default and not any_name:
        raise invalid_request("overlap has no effect without tile: give both, or neither")
    return read_options(given), read(TIMEOUT_MS, given), None if tile is None else Tiling(tile, overlap)


class HttpRequest(ABC):
    """A request whose head is there. `scope` is ASGI's, with the request's context as `anychip`; `headers`: by name."""

    scope: Scope
    headers: Fields

    @abstractmethod
    async def body(self, max_bytes: int, lease: Lease, limit: Interruption) -> Body:
        """Read the whole body; its bytes are taken of `lease` as they arrive, and `limit` is told of them.

        Raises BODY_TOO_LARGE, QUEUE_FULL, ClientLeftError.
        """

    @abstractmethod
    def watched(self, run: Run[Answer], on_leave: Callable[[], None]) -> Awaitable[Answer]:
        """Run, to be awaited at once. If the client leaves first, call `on_leave` and cancel the run.

        It then raises ClientLeftError, or the task is cancelled. The body must have been read.
        """


class AsgiRequest(HttpRequest):
    """A request that came through an ASGI server."""

    def __init__(self, scope: Scope, receive: Receive) -> None:
        self.scope, self.headers = scope, dict(scope["headers"])
        self._receive = receive

    @classmethod
    def of(cls, request: Request) -> AsgiRequest:
        """Make the same request from the framework's."""
        return cls(request.scope, request.receive)

    async def body(self, max_bytes: int, lease: Lease, limit: Interruption) -> Body:  # noqa: D102
        declared = self.headers.get(b"content-length", b"")
        too_large = ServiceError("BODY_TOO_LARGE", f"the body is larger than the {max_bytes} bytes that are read here")
        if declared.isdigit() and (len(declared) > LENGTH_DIGITS or int(declared) > max_bytes):
            raise too_large
        chunks: list[bytes] = []
        size, more = 0, True
        while more:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientLeftError
            more = message.get("more_body", False)
            chunk = message.get("body", b"")
            size += len(chunk)
            if size > max_bytes:
                raise too_large
            lease.take(len(chunk))
            chunks.append(chunk)
            if more and size:
                limit.arrived(size)
        if len(chunks) > 1:
            limit.arrived_wholly()
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    async def watched(self, run: Run[Answer], on_leave: Callable[[], None]) -> Answer:  # noqa: D102
        # The body has been read: the next message is taken for the end.
        with Interruption() as interruption:

            async def watch() -> None:
                while (await self._receive())["type"] != "http.disconnect":
                    pass
                on_leave()
                interruption.interrupt(ClientLeftError())

            watcher = asyncio.ensure_future(watch())
            try:
                return await run()
            finally:
                # Nothing is awaited after this, so that a client who leaves now interrupts nothing else.
                watcher.cancel()


class HttpCall(Call[Answer]):
    """A call over HTTP. `body` is there once `read` has ended, without its Content-Encoding when `asked` is called."""

    def __init__(self, request: HttpRequest, model: str, version: str = "") -> None:
        self.context, self.model, self.version = request.scope["anychip"], model, version
        self.request, self.headers = request, request.headers
        self.body: Body = b""
        self._max_body_bytes = 0

    def terms(self, settings: Settings) -> Terms:  # noqa: D102
        self._max_body_bytes = settings.max_body_bytes
        timeout_ms, priority = read_headers(self.headers)
        timeout_s = (timeout_ms or settings.timeout_ms) / 1e3
        return Terms(deadline_s(self.context.started_s, timeout_s), priority, self.context.recorder)

    async def read(self, lease: Lease, limit: Interruption) -> None:  # noqa: D102
        limit.least_bytes_per_s = _LEAST_UPLOAD_BYTES_PER_S
        self.body = await self.request.body(self._max_body_bytes, lease, limit)

    async def prepare(  # noqa: D102
        self, ingress: Ingress, served: ServedModel, terms: Terms, lease: Lease
    ) -> Run[Answer]:
        if stated := self.headers.get(b"content-encoding"):
            encoding = stated.decode("latin-1").strip().lower()
            if encoding not in ("", "identity"):
                self.body = await ingress.offload(inflated, encoding, self.body, self._max_body_bytes)
                lease.take(len(self.body))
        return await self.asked(ingress, served, terms, lease)

    @abstractmethod
    async def asked(self, ingress: Ingress, served: ServedModel, terms: Terms, lease: Lease) -> Run[Answer]:
        """Return the run that the body asks of the model, as `prepare` says."""

    def watched(self, run: Run[Answer], on_leave: Callable[[], None]) -> Awaitable[Answer]:  # noqa: D102
        return self.request.watched(run, on_leave)
