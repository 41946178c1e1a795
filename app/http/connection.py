"""uvicorn's HTTP/1.1 connection, with limits, and with each answer sent in one piece.

uvicorn writes an answer's head and its body apart, and uvloop sends each at once: two system calls, two packets, and a
client that wakes up twice.

Owns: the speed of heads, and the end of a connection whose request was not read to its end, or whose client does not
read. Must not know what is asked. app.http.head owns what a head may be, app.ingress.listener how many connections
there are.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable
from typing import Any, cast

import orjson
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from app.errors import ERRORS, error_body
from app.http.head import HEAD_BYTES, NO_HTTP, HeadReader, Refusal
from app.ingress.sending import PIECE_BYTES, STOOD_STILL_S, SendWatch

_MOST_BYTES = 64 * 1024  # Most bytes that a turn holds back: large answers are not copied together.


class OnePiece:
    """A transport that sends at the end of a turn; everything but writing and closing goes to the one within."""

    def __init__(self, transport: asyncio.Transport, on_close: Callable[[], None] | None = None) -> None:
        """Keep `on_close`: it is called instead of closing the transport within, after all that was written is sent."""
        self.within = transport
        self.closing = False
        self._on_close = on_close or transport.close
        self._loop = asyncio.get_running_loop()
        self._parts: list[bytes] = []
        self._held_bytes = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.within, name)

    def write(self, data: bytes) -> None:
        """Send the bytes at the end of this turn, or now if they are many."""
        if not self._parts:
            self._loop.call_soon(self.flush)
        self._parts.append(data)
        self._held_bytes += len(data)
        if self._held_bytes > _MOST_BYTES:
            self.flush()

    def close(self) -> None:
        """Send what is left, and nothing after it."""
        self.flush()
        self._on_close()

    def end(self) -> None:
        """Drop `on_close` after the connection's end, as it refers back to the owner of this."""
        self._on_close = self.within.close

    def is_closing(self) -> bool:
        """Return True if nothing more can be written; `closing` says so too."""
        return self.closing or self.within.is_closing()

    def flush(self) -> None:
        """Send what is held back, unless the connection has ended meanwhile: then no client reads it."""
        if self._parts:
            data = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
            self._parts.clear()
            self._held_bytes = 0
            if not self.within.is_closing():
                self.within.write(data)


log = logging.getLogger("anychip.http")

_HEAD_TIMEOUT_S = 10.0
CLOSE, KEEP_ALIVE = (b"connection", b"close"), (b"connection", b"keep-alive")
"""Headers of the last answer on a connection; of an HTTP/1.0 client that wants another one, and of the answer to it."""
_LINGER_IDLE_S = 5.0
_LINGER_S = 30.0
_LINGER_BYTES = 256 * 2**20


class Discarding:
    """Drop of the bytes that still come of an answered request. Beyond a time and a size it ends the connection.

    A client that is still sending would otherwise find its connection reset, and never read its answer.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, end_connection: Callable[[], None]) -> None:
        self._loop, self._end_connection = loop, end_connection
        self._bytes = 0
        self._idle: asyncio.TimerHandle | None = None
        self._latest: asyncio.TimerHandle | None = None

    @property
    def on(self) -> bool:
        """True while more is expected."""
        return self._latest is not None

    def begin(self) -> None:
        """Drop the bytes that come from here on."""
        if self._latest is None:
            self._bytes = 0
            self._latest = self._loop.call_later(_LINGER_S, self._end_connection)
        self.took(0)

    def took(self, size: int) -> None:
        """Count dropped bytes."""
        self._bytes += size
        if self._idle is not None:
            self._idle.cancel()
        if self._bytes > _LINGER_BYTES:
            self._end_connection()
        else:
            self._idle = self._loop.call_later(_LINGER_IDLE_S, self._end_connection)

    def end(self) -> None:
        """Stop: nothing more is to be dropped."""
        for timer in (self._idle, self._latest):
            if timer is not None:
                timer.cancel()
        self._idle = self._latest = None


class _Answering(RequestResponseCycle):
    """Answer that says whether the connection ends: the least uvicorn does not, and none says that HTTP/1.0's stays."""

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start" and CLOSE not in (headers := [*message["headers"]]):
            message["headers"] = [*headers, KEEP_ALIVE if self.keep_alive else CLOSE]
        await super().send(message)


class LimitedProtocol(HttpToolsProtocol):
    """Protocol for uvicorn's `http` setting. `on_lost`: called with it at its end, by the listener that counts it.

    `lent`: another protocol reads and answers the present request, and no time limit of ours ends it.
    """

    on_lost: Callable[[LimitedProtocol], None] | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._head = HeadReader()
        self._unproductive_bytes = 0
        self.lingering = False
        self._timer: asyncio.TimerHandle | None = None
        self.lent = False
        self._idle_since_s = 0.0
        self.closing = False
        self.raw = transport
        """The transport within, which holds nothing back."""
        self._pieces = OnePiece(transport, self.end)
        self._sending = SendWatch(transport)
        self._discarding = Discarding(self.loop, transport.abort)
        super().connection_made(cast(asyncio.Transport, self._pieces))
        if self.encrypted:
            transport.set_write_buffer_limits(PIECE_BYTES)
        self._arm_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        self._unset_keepalive_if_required()
        self._discarding.end()
        super().connection_lost(exc)
        self._sending.end()  # This closes the transport once more.
        self._pieces.end()
        if self.on_lost is not None:
            self.on_lost(self)

    @property
    def encrypted(self) -> bool:
        """True if TLS is spoken."""
        return self.scheme == "https"

    def pause_writing(self) -> None:
        """Watch the sending: the client does not read as fast as it is answered."""
        super().pause_writing()
        self._sending.begin()

    def resume_writing(self) -> None:
        """End the watch: the client has read all or nearly all of the answer."""
        super().resume_writing()
        if not self.raw.is_closing():
            self._sending.end()

    @property
    def between_requests(self) -> bool:
        """True if the next byte begins a request, with none before it still to be answered."""
        if self.cycle is not None and not self.cycle.response_complete:
            return False
        ended = self.lingering or self.raw.is_closing()
        head = self._head  # Not by `is_awaited`: this is asked for each request.
        return head.open and not head.bytes and not self.pipeline and not ended

    def take_back(self, *, keep_alive: bool, unread: bool) -> None:
        """Take the connection back after that request. `unread`: its body is not read yet; `drop` counts the rest."""
        self.lent = False
        if self._timer is not None:
            self._disarm()
        self.server_state.total_requests += 1
        if self.lingering or self.raw.is_closing():
            return
        if not keep_alive and unread:
            self.linger()
        elif not keep_alive:
            self.transport.close()
        elif unread:
            self._discard_rest()
        else:
            self._keep_alive()

    def drop(self, size: int, *, done: bool) -> None:
        """Count dropped bytes of an unread body. `done`: the next byte begins a request."""
        self._discarding.took(size)
        if done:
            self._rest_has_come()

    def shutdown(self) -> None:
        """Close once the current answer is sent, as the server stops; `closing` tells the protocol that answers."""
        self.closing = True
        if not self.lent:
            super().shutdown()

    def data_received(self, data: bytes) -> None:
        if self.lingering:
            self._discarding.took(len(data))
            return
        self._unset_keepalive_if_required()
        if self._head.open:
            if self._timer is None:
                self._arm_head()
            data = self._head.whole(data)
            if not data:
                if self._head.refusal is not None:
                    self._refuse(self._head.refusal)
                return
        self._unproductive_bytes += len(data)
        super().data_received(data)
        if self.parser is None or self.transport.is_closing():
            return
        if self._unproductive_bytes > HEAD_BYTES and not self._head.open:
            # Only a body's chunk extensions and trailers: no real request has so many.
            self._refuse(Refusal(0, "the trailers are larger than what is read here", "HEADERS_TOO_LARGE"))
        elif not self._head.open and self.cycle is not None and self.cycle.response_complete:
            self._discarding.took(len(data))

    def on_message_begin(self) -> None:
        self._head.begin()
        if self._timer is None:
            self._arm_head()
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Count a header of the head; drop one that follows the body (a trailer)."""
        if self._head.open:
            self._head.count()
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """End the head: check it, and begin its request."""
        self._unproductive_bytes = 0
        self._discarding.end()
        self._disarm()
        version = self.parser.get_http_version()
        self._head.end(version, self.headers, self.url)
        super().on_headers_complete()
        self.cycle.keep_alive = self.parser.should_keep_alive()
        if not self.cycle.keep_alive or version == "1.0":
            self.cycle.__class__ = _Answering

    def on_body(self, body: bytes) -> None:
        self._unproductive_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """End the request; the next bytes are another's head."""
        self._head.open = True
        self._unproductive_bytes = 0
        if self._discarding.on:  # Answered before it was read whole: it may go on after all.
            self._rest_has_come()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """End the answer; if its request was not read to its end, drop what follows."""
        super().on_response_complete()
        if not self._head.is_awaited and not self.transport.is_closing():
            self._discard_rest()

    def send_400_response(self, msg: str) -> None:
        """Refuse a request that the parser does not understand."""
        self._refuse(self._head.refusal or NO_HTTP)

    def linger(self) -> None:
        """End the sending, and drop what still arrives."""
        self.lingering = self._pieces.closing = True
        transport = self.raw
        if transport.is_closing():
            return
        try:
            transport.write_eof()
        except (OSError, NotImplementedError, RuntimeError):
            transport.close()
            return
        self.flow.resume_reading()
        self._discard_rest()

    def end(self) -> None:
        """Close the transport within, with care for a client that is still sending, or does not read what is left."""
        transport = self.raw
        if not self._head.is_awaited and not transport.is_closing():
            self.linger()
        else:
            transport.close()
        if transport.get_write_buffer_size():
            self._sending.begin()

    def _discard_rest(self) -> None:
        self._unset_keepalive_if_required()
        self._disarm()
        self._discarding.begin()

    def _rest_has_come(self) -> None:
        self._discarding.end()
        self._keep_alive()

    def _keep_alive(self) -> None:
        self._idle_since_s = self.loop.time()
        if self.timeout_keep_alive_task is None:
            self._look_after(self.timeout_keep_alive)

    def _look_after(self, seconds: float) -> None:
        self.timeout_keep_alive_task = self.loop.call_later(seconds, self.timeout_keep_alive_handler)

    def timeout_keep_alive_handler(self) -> None:
        """Close an idle connection. One timer goes on over many requests, as a new one for each would cost more."""
        left_s = self._idle_since_s + self.timeout_keep_alive - self.loop.time()
        if self.lent:
            self._look_after(self.timeout_keep_alive)
        elif left_s > 0:
            self._look_after(left_s)
        else:
            super().timeout_keep_alive_handler()

    def _head_timed_out(self) -> None:
        answering = self.cycle is not None and not self.cycle.response_complete  # The head is the next request's.
        if self.lent or answering or self.loop.time() - self._due_s > STOOD_STILL_S:
            self._arm_head()
        elif self._head.bytes:
            self._refuse(Refusal(0, f"the headers took longer than {_HEAD_TIMEOUT_S:g} s", "REQUEST_TIMEOUT"))
        else:
            self.transport.close()

    def _refuse(self, refusal: Refusal) -> None:
        """Answer bytes that are no request yet, and close."""
        if self.lingering or self.transport.is_closing():
            return
        if self.cycle is not None and not self.cycle.response_complete:
            self.raw.abort()  # Another answer is being written: no other can go in between.
            return
        self.transport.write(last_words(refusal))
        self._pieces.flush()
        self.linger()

    def _arm_head(self) -> None:
        self._disarm()
        self._due_s = self.loop.time() + _HEAD_TIMEOUT_S
        self._timer = self.loop.call_later(_HEAD_TIMEOUT_S, self._head_timed_out)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def last_words(refusal: Refusal, headers: bytes = b"") -> bytes:
    """Write the answer to bytes that are no request yet; the connection ends with it."""
    request_id = secrets.token_hex(8)
    status, message, code = refusal
    body = orjson.dumps(error_body(code, message, request_id))
    log.debug("%s: %s", code, message, extra={"request_id": request_id})
    return b"".join(
        (
            STATUS_LINE[status or ERRORS[code].status],
            b"content-type: application/json\r\ncontent-length: %d\r\n" % len(body),
            b"x-request-id: %s\r\nconnection: close\r\n" % request_id.encode(),
            headers,
            b"\r\n",
            body,
        )
    )


def too_many() -> bytes:
    """Write the answer to a client that has all the connections it may have."""
    return last_words(Refusal(0, "there are too many connections; try again", "QUEUE_FULL"), b"retry-after: 1\r\n")
