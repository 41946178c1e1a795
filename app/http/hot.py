"""The hot routes: images and tensors for a model, answered without ASGI and a framework in between.

    bytes ─► the head of an ordinary request of a hot route? ─► its body, in one buffer ─► a task ─► the answer
                └─ no ─► uvicorn and FastAPI, who have the same routes and answer the same (app.http.connection)

Owns: which requests are ordinary, and their way from bytes to bytes. An ordinary head arrives in one piece, says how
large its body is, and asks for nothing special (`Expect`, `Upgrade`, chunks). All else goes the other way, so that one
place reads the rare and the wrong. app.http.connection owns the limits on heads and idle connections of both ways; the
routes own the meaning of a request. A client that leaves cancels the work for it.
"""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, TypeAlias, TypeVar, cast

import httptools
from starlette.types import Scope
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE
from uvicorn.server import ServerState

from app.access.rules import Bind
from app.errors import ClientLeftError, ServiceError
from app.http.call import LENGTH_DIGITS, Body, Content, Fields, Header, HttpRequest, common_headers, error_content
from app.http.connection import CLOSE, KEEP_ALIVE, LimitedProtocol
from app.http.edge import Cors
from app.http.head import HEAD_BYTES, HEADERS
from app.http.routes import infer, predict
from app.ingress.budget import Lease
from app.ingress.context import UNCOUNTED_BYTES, Interruption, RequestContext, taken_back
from app.ingress.ingress import Ingress, Run
from app.ingress.sending import PIECE_BYTES, PLAIN_PIECE_BYTES
from app.ingress.tunnel import Tunnel

Answer = TypeVar("Answer")

Handler = Callable[..., Awaitable[Content]]
"""Function that answers; called with the ingress, the request, and the names in its path."""

NAME = rb"([\w.~+@=,:-]+)"
HotRoute = tuple[re.Pattern[bytes], str, Handler]
"""Pattern of its paths, whose names need no decoding; the route as the API describes it; its handler."""

ROUTES: tuple[HotRoute, ...] = (
    (re.compile(rb"/v1/models/%b:predict" % NAME), predict.ROUTE, predict.answer),
    (re.compile(rb"/v2/models/%b(?:/versions/%b)?/infer" % (NAME, NAME)), infer.ROUTE, infer.answer),
)
_REQUEST_LINE = re.compile(rb'POST (/[\w.~+@=,:/-]+)(?:\?([!"$-~]*))? HTTP/1\.[01]\r\n')
_HEAD_END = re.compile(rb"\r\n\r\n")
_SPECIAL = {b"transfer-encoding", b"expect", b"upgrade", b"http2-settings"}
_READ_BYTES = 256 * 1024
_NOTHING_READ = memoryview(b"")
_SCRATCH = memoryview(bytearray(_READ_BYTES))
"""Buffer for bytes not yet known to be a body. One for all connections: it is read at once, within the same call."""


class _Head(list[Header]):
    """Headers that the parser has found, in order, their names in lower case."""

    __slots__ = ()

    def on_header(self, name: bytes, value: bytes) -> None:
        self.append((name.lower(), value))


class HotRequest(HttpRequest):
    """A request that came through `HotProtocol`, which tells it of arrived bytes and of a client that leaves.

    `task`: answers it.
    """

    task: asyncio.Task[None]

    def __init__(self, scope: Scope, headers: Fields, length: int, begun: bytes, *, keep_alive: bool) -> None:
        """Begin with `begun`: the part of the body's `length` bytes that is there."""
        self.scope, self.headers = scope, headers
        self.keep_alive = keep_alive
        self.missing = length - len(begun)
        self._buffer: Body = begun
        self._view = _NOTHING_READ
        self._size = len(begun)
        self._reader: tuple[Lease, Interruption] | None = None
        self._arrived = asyncio.get_running_loop().create_future() if self.missing else None
        self.left = False
        self._on_leave: Callable[[], None] | None = None

    def room(self) -> memoryview:
        """Return the buffer for more of the body. It grows with the bytes: a large Content-Length reserves nothing."""
        if self._size == len(self._buffer):
            buffer = bytearray(self._size + min(self.missing, max(self._size, _READ_BYTES)))
            buffer[: self._size] = self._buffer
            self._buffer, self._view = buffer, memoryview(buffer)
        return self._view[self._size :]

    def arrived(self, size: int) -> None:
        """Count bytes that have arrived in `room`."""
        self._size += size
        self.missing -= size
        if self._reader is None or self._arrived is None or self._arrived.done():
            return
        lease, limit = self._reader
        try:
            lease.take(size)
        except ServiceError as error:
            self._arrived.set_exception(error)
            return
        if self.missing:
            limit.arrived(self._size)
        else:
            self._arrived.set_result(None)

    def leave(self) -> None:
        """Cancel the request: the client is gone."""
        self.left = True
        if self._on_leave is not None:
            self._on_leave()
            self.task.cancel()
        elif self._arrived is not None and not self._arrived.done():
            self._arrived.set_exception(ClientLeftError())
            self._arrived.exception()  # The route gets it when it reads; it may not read.

    def end(self) -> None:
        """Drop the part of the body that has come: it is not read any more."""
        self._buffer, self._view = b"", _NOTHING_READ
        self._arrived = self._reader = None

    async def body(self, max_bytes: int, lease: Lease, limit: Interruption) -> Body:
        lease.take(self._size)
        if self._arrived is not None:
            if self.missing:
                self._reader = lease, limit
                if self._size:
                    limit.arrived(self._size)
                await self._arrived
            limit.arrived_wholly()
        whole = self._buffer
        self.end()
        return whole

    async def watched(self, run: Run[Answer], on_leave: Callable[[], None]) -> Answer:
        self._on_leave = on_leave
        if self.left:
            self.leave()
        try:
            return await run()
        finally:
            self._on_leave = None  # What is written after it costs no more than a client that does not read it.


OpenTunnel: TypeAlias = Callable[[int, bool, socket.socket], None]
"""Function that gives the owner the end of a socket, with the connection's number and whether TLS is spoken."""


class TunnellingProtocol(LimitedProtocol):
    """Protocol of a connection to an ingress: at the first byte that is no hot request's it goes on with the owner."""

    number = 0
    _tunnel: Tunnel | None = None

    def __init__(self, tunnel: OpenTunnel, *about: Any) -> None:
        super().__init__(*about)
        self._open_tunnel = tunnel

    @property
    def between_requests(self) -> bool:
        """True if the next byte begins a request that may be answered here."""
        return self._tunnel is None and super().between_requests

    def data_received(self, data: bytes) -> None:
        """Send these bytes, and all that follow, to the owner."""
        if self._tunnel is None:
            try:
                ours, theirs = socket.socketpair()
            except OSError:  # No descriptor: this connection ends, and no other.
                self.raw.abort()
                return
            self.lent = True
            tunnel = self._tunnel = Tunnel(self.raw, self.end)
            ours.setblocking(False)
            self._open_tunnel(self.number, self.encrypted, theirs)
            task: asyncio.Task[Any] = self.loop.create_task(self.loop.connect_accepted_socket(lambda: tunnel, ours))
            self.server_state.tasks.add(task)
            task.add_done_callback(self.server_state.tasks.discard)
        self._tunnel.send(data)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._tunnel is not None:
            self._tunnel.abort()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Pause the owner's answer, as the client does not read: the owner sees that it does not leave."""
        super().pause_writing()
        if self._tunnel is not None:
            self._tunnel.pause(on=True)

    def resume_writing(self) -> None:
        """Let the owner's answer go on: the client reads again."""
        super().resume_writing()
        if self._tunnel is not None:
            self._tunnel.pause(on=False)


class HotProtocol(asyncio.BufferedProtocol):
    """Protocol for uvicorn's `http` setting, made by `protocol`: one connection.

    `_request`: the one that is read or answered here; `_general`: uvicorn's protocol, for all others. `_task` answers
    the requests; `_following` gets the next one.
    """

    on_lost: Callable[[Any], None]
    """Callback for the end of the connection, called with it; the listener that counts it sets it."""
    tunnelled_from: tuple[str, bool] | None = None
    """Client's address, and whether it speaks TLS, if an ingress of another process tunnels this connection."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        ingress: Ingress,
        bind: Bind,
        cors: Cors,
        routes: Sequence[HotRoute],
        tunnel: OpenTunnel | None,
    ) -> None:
        self.ingress, self.bind, self.cors, self.routes, self.tunnels = ingress, bind, cors, routes, tunnel is not None
        about = config, server_state, app_state, _loop
        self._general = LimitedProtocol(*about) if tunnel is None else TunnellingProtocol(tunnel, *about)
        self._server_state = server_state
        self._request: HotRequest | None = None
        self._task: asyncio.Task[None] | None = None
        self._following: asyncio.Future[tuple[HotRequest, str, Handler, Sequence[str]]]
        self._unread = 0  # Bytes of a body that was refused before it had arrived.
        self._held = b""  # Bytes behind the request that is being answered.
        self._promise: Callable[[], None] | None = None  # Returns the budget promised to its body.
        self.on_lost = lambda _: None

    def tunnel_as(self, number: int) -> None:
        """Give it the number by which the owner knows it, if it may be tunnelled there."""
        cast(TunnellingProtocol, self._general).number = number

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        self._general.connection_made(transport)
        if self.tunnelled_from is not None:
            address, encrypted = self.tunnelled_from
            self._general.client = address, 0
            self._general.scheme = "https" if encrypted else "http"

    def connection_lost(self, error: Exception | None) -> None:
        self._general.connection_lost(error)
        self.on_lost(self)
        if self._request is not None:
            self._request.leave()
        elif self._task is not None:
            self._task.cancel()

    def pause_writing(self) -> None:
        self._general.pause_writing()

    def resume_writing(self) -> None:
        self._general.resume_writing()

    def get_buffer(self, _: int) -> memoryview:
        request = self._request
        return request.room() if request is not None and request.missing else _SCRATCH

    def buffer_updated(self, size: int) -> None:
        request = self._request
        if request is not None and request.missing:
            request.arrived(size)
        else:
            self._received(_SCRATCH[:size])

    def _received(self, data: memoryview) -> None:
        """Handle `data`, whose bytes are gone afterwards: copy what is needed longer."""
        if self._request is not None:
            self._held += data
            self._transport.pause_reading()
        elif self._unread:
            dropped = min(self._unread, len(data))
            self._unread -= dropped
            self._general.drop(dropped, done=not self._unread)
            if dropped < len(data):
                self._received(data[dropped:])
        elif not (self._general.between_requests and self._begun(data)):
            self._general.data_received(bytes(data))

    def _begun(self, data: memoryview) -> bool:
        """Begin to answer if an ordinary request of a hot route begins here; return True if so."""
        line = _REQUEST_LINE.match(data)
        head_end = _HEAD_END.search(data, 0, HEAD_BYTES) if line else None
        if line is None or head_end is None:
            return False
        path = line[1]
        for each in self.routes:
            if names := each[0].fullmatch(path):
                break
        else:
            return False
        end = head_end.end()
        fields = _Head()
        parser = httptools.HttpRequestParser(fields)
        try:
            parser.feed_data(data[:end])
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            return False
        headers = dict(fields)
        length = headers.get(b"content-length", b"")
        hosts = 1 if len(headers) == len(fields) else sum(name == b"host" for name, _ in fields)
        if b"host" not in headers or hosts > 1:
            return False
        if len(fields) > HEADERS or not length.isdigit() or not _SPECIAL.isdisjoint(headers):
            return False
        if len(length) > LENGTH_DIGITS or int(length) > self.ingress.link.settings.max_body_bytes:
            return False
        promise = None
        if self.tunnels:
            if self.ingress.access.counts(fields):  # The owner counts what one caller has in flight.
                return False
            client = self._general.client
            promise = self.ingress.promised(fields, str(client[0]) if client else "", int(length))
            if promise is None:  # It would be refused here; the owner has more.
                return False
        scope = {
            "type": "http",
            "method": "POST",
            "http_version": line[0][-5:-2].decode(),
            "scheme": self._general.scheme,
            "path": line[1].decode(),
            "query_string": line[2] or b"",
            "headers": fields,
            "client": self._general.client,
        }
        keep_alive = parser.should_keep_alive()
        body = bytes(data[end : end + int(length)])
        self._held = bytes(data[end + len(body) :])
        if self._held:
            self._transport.pause_reading()
        self._request = request = HotRequest(scope, headers, int(length), body, keep_alive=keep_alive)
        self._promise = promise
        self._general.lent = True
        if self._task is None:
            self._following = self._loop.create_future()
            self._task = self._loop.create_task(self._serve_all())
        self._following.set_result((request, *each[1:], [name.decode() for name in names.groups(b"")]))
        request.task = self._task
        self._server_state.tasks.add(self._task)
        return True

    async def _serve_all(self) -> None:
        """Answer the requests of the connection, one after another: a task for each would cost 5 microseconds more."""
        while self._following.done() or not self._transport.is_closing():
            following = await self._following
            self._following = self._loop.create_future()
            await self._serve(*following)
            del following  # Else the request would live until the next one.

    async def _serve(self, request: HotRequest, route: str, handler: Handler, names: Sequence[str]) -> None:
        """Answer a request: do what app.http.edge and uvicorn do around the routes of FastAPI."""
        link, scope = self.ingress.link, request.scope
        context = RequestContext(link, scope)
        is_whole = False
        try:
            with context:
                context.route, context.task = route, request.task
                try:
                    context.admit(self.ingress.access, "infer", self.bind)
                    content = await handler(self.ingress, request, *names)
                    if len(content[0]) > UNCOUNTED_BYTES:
                        context.hold(len(content[0]), self.ingress.bodies)
                    status = 200
                except asyncio.CancelledError:
                    if not request.left:
                        raise
                    # A task that ends with an error holds it, the error the frames, and these the task and the body.
                    taken_back(request.task)
                    context.code = "CANCELLED"
                    return
                except Exception as error:  # No answer to a client that has left: that error goes on, to the context.
                    failure = context.failure(error)
                    status, content = failure.status, error_content(failure, context)
                if not self._transport.is_closing():
                    context.status = status
                    common = common_headers(link, context)
                    if self.cors.on and self.bind == "public":
                        common += self.cors.headers(scope["headers"])
                    if not request.missing:
                        request.end()  # While the answer is sent its memory is not needed.
                    head, body, flow = self._head(request, status, content, common), content[0], self._general.flow
                    if len(body) <= PIECE_BYTES or (len(body) <= PLAIN_PIECE_BYTES and not self._general.encrypted):
                        self._transport.writelines((head, body))
                    else:
                        await self._send_pieces(head, body)
                    # Else the rest of the request would come, and be kept, meanwhile.
                    if flow.write_paused and not request.missing and not self._transport.is_closing():
                        await flow.drain()
            is_whole = bool(context.status)
        finally:
            # The client is gone, the server's stop has cancelled this task, or a part of the answer is missing.
            if not is_whole:
                self._transport.abort()
            self._ended(request)

    def _head(self, request: HotRequest, status: int, content: Content, common: list[Header]) -> bytes:
        if self._general.closing or CLOSE in common:
            request.keep_alive = False
        if not request.keep_alive and CLOSE not in common:
            common.append(CLOSE)
        elif request.keep_alive and request.scope["http_version"] == "1.0":
            common.append(KEEP_ALIVE)
        lines = [STATUS_LINE[status]]
        for name, value in (*self._server_state.default_headers, *content[1], *common):
            lines += (name, b": ", value, b"\r\n")
        lines.append(b"\r\n")
        return b"".join(lines)

    async def _send_pieces(self, head: bytes, body: bytes | memoryview) -> None:
        """Write an answer that may take long to encrypt or to send, piece by piece as it leaves."""
        flow, content = self._general.flow, memoryview(body)
        piece_bytes = PIECE_BYTES if self._general.encrypted else PLAIN_PIECE_BYTES
        self._transport.write(head)
        for start in range(0, len(body), piece_bytes):
            if self._transport.is_closing():
                return
            self._transport.write(content[start : start + piece_bytes])
            await (flow.drain() if flow.write_paused else asyncio.sleep(0))

    def _ended(self, request: HotRequest) -> None:
        self._request = None
        self._server_state.tasks.discard(request.task)
        request.end()
        if self._promise is not None:
            self._promise()
            self._promise = None
        self._unread = request.missing if request.keep_alive else 0
        self._general.take_back(keep_alive=request.keep_alive, unread=bool(request.missing))
        held, self._held = self._held, b""
        if held and not self._transport.is_closing():
            self._transport.resume_reading()
            self._received(memoryview(held))


def protocol(
    ingress: Ingress, bind: Bind = "public", more: Sequence[HotRoute] = (), tunnel: OpenTunnel | None = None
) -> Callable[..., HotProtocol]:
    """Return the function that makes connections whose hot routes lead into `ingress`, and `bind` is their port.

    `more`: hot routes beside our own; `tunnel`: in a process that has no other routes, passes a connection on that asks
    for something else.
    """
    cors, routes = Cors(ingress.link.settings.origins), (*ROUTES, *more)
    return partial(HotProtocol, ingress=ingress, bind=bind, cors=cors, routes=routes, tunnel=tunnel)
