"""uvicorn's HTTP/1.1 connection, with limits, and with each answer sent in one piece.

uvicorn writes an answer's head and its body apart, and uvloop sends each at once: two system calls, two packets, and a
client that wakes up twice.

Owns: the size, number and speed of heads, and the end of a connection whose request was not read to its end, or whose
client does not read. Must not know what is asked. app.ingress.listener owns the number of connections.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
from collections.abc import Callable
from typing import Any, cast

import orjson
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from app.errors import ERRORS, Code, error_body
from app.http.head import Refusal, refusal_of, refusal_of_line
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

_HEAD_END = re.compile(rb"\r?\n\r?\n")
_UPGRADE = re.compile(rb"\r\n(?:upgrade|http2-settings):[^\r\n]*", re.IGNORECASE)
HEAD_BYTES = 64 * 1024
HEADERS = 100
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


class LimitedProtocol(HttpToolsProtocol):
    """Protocol for uvicorn's `http` setting. `on_lost`: called with it at its end, by the listener that counts it.

    `lent`: another protocol reads and answers the present request, and no time limit of ours ends it.
    """

    on_lost: Callable[[LimitedProtocol], None] | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._in_head = True  # The next bytes belong to a head; False between a head's end and its message's.
        self._head = b""
        self._unproductive_bytes = 0
        self._headers = 0
        self.lingering = False
        self._timer: asyncio.TimerHandle | None = None
        self._refusal: Refusal | None = None
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
        return self._in_head and not self._head and not self.pipeline and not ended

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
        if self._in_head:
            if self._timer is None:
                self._arm_head()
            whole = self._whole_head(data)
            if whole is None:
                return
            data = whole
        self._unproductive_bytes += len(data)
        super().data_received(data)
        if self.parser is None or self.transport.is_closing():
            return
        if self._unproductive_bytes > HEAD_BYTES and not self._in_head:
            # Only a body's chunk extensions and trailers: no real request has so many.
            self._refuse("HEADERS_TOO_LARGE", "the trailers are larger than what is read here")
        elif not self._in_head and self.cycle is not None and self.cycle.response_complete:
            self._discarding.took(len(data))

    def _whole_head(self, data: bytes) -> bytes | None:
        """Return the bytes that have arrived, once they hold the end of a head; None until then.

        HTTP/2 is not spoken here. Java's client asks for it with every request (`Upgrade: h2c`), which a server may
        ignore; the parser would take what follows the head for something else than its body.
        """
        searched = max(0, len(self._head) - 3)
        if self._head:
            data, self._head = self._head + data, b""
        elif not data[:1].isalpha() and data[:1] not in (b"\r", b"\n"):
            return data  # No request line begins like this: the parser says so at once.
        found = _HEAD_END.search(data, searched, HEAD_BYTES + 4)
        if found is None:
            if len(data) > HEAD_BYTES:
                self._refuse("HEADERS_TOO_LARGE", f"the headers are larger than {HEAD_BYTES} bytes")
            else:
                self._head = data
            return None
        end = found.end()
        if refusal := refusal_of_line(data):
            self._refuse("INVALID_REQUEST", refusal.message, refusal.status)
            return None
        if _UPGRADE.search(data, 0, end):
            data = _UPGRADE.sub(b"", data[:end]) + data[end:]
        return data

    def on_message_begin(self) -> None:
        self._headers = 0
        self._in_head = True
        if self._timer is None:
            self._arm_head()
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Count a header of the head; drop one that follows the body (a trailer)."""
        if not self._in_head:
            return
        self._headers += 1
        if self._headers > HEADERS:
            raise ValueError("too many headers")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """End the head: check it, and begin its request."""
        self._in_head = False
        self._unproductive_bytes = 0
        self._discarding.end()
        self._disarm()
        self._refusal = refusal_of(self.parser.get_http_version(), self.headers, self.url)
        if self._refusal is not None:
            raise ValueError(self._refusal.message)
        super().on_headers_complete()
        self.cycle.keep_alive = self.parser.should_keep_alive()
        if not self.cycle.keep_alive or self.parser.get_http_version() == "1.0":  # The least uvicorn does not say it.
            ends_or_stays = KEEP_ALIVE if self.cycle.keep_alive else CLOSE
            self.cycle.default_headers = [*self.cycle.default_headers, ends_or_stays]

    def on_body(self, body: bytes) -> None:
        self._unproductive_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """End the request; the next bytes are another's head."""
        self._in_head = True
        self._unproductive_bytes = 0
        if self._discarding.on:  # Answered before it was read whole: it may go on after all.
            self._rest_has_come()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """End the answer; if its request was not read to its end, drop what follows."""
        super().on_response_complete()
        if self.message_incomplete() and not self.transport.is_closing():
            self._discard_rest()

    def send_400_response(self, msg: str) -> None:
        """Refuse a request that the parser does not understand."""
        if self._headers > HEADERS:
            self._refuse("HEADERS_TOO_LARGE", f"there are more than {HEADERS} headers")
        elif self._refusal is not None:
            self._refuse("INVALID_REQUEST", self._refusal.message, self._refusal.status)
        else:
            self._refuse("INVALID_REQUEST", "this is no HTTP/1.1 request")

    def message_incomplete(self) -> bool:
        """Return True if a request has begun whose end has not arrived."""
        return not self._in_head or bool(self._head)

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
        if self.message_incomplete() and not transport.is_closing():
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
        elif self._head:
            self._refuse("REQUEST_TIMEOUT", f"the headers took longer than {_HEAD_TIMEOUT_S:g} s")
        else:
            self.transport.close()

    def _refuse(self, code: Code, message: str, status: int | None = None) -> None:
        """Answer bytes that are no request yet, and close. `status`: if it is not the code's own."""
        if self.lingering or self.transport.is_closing():
            return
        if self.cycle is not None and not self.cycle.response_complete:
            self.raw.abort()  # Another answer is being written: no other can go in between.
            return
        self.transport.write(last_words(code, message, status))
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


def last_words(code: Code, message: str, status: int | None = None, headers: bytes = b"") -> bytes:
    """Write the answer to bytes that are no request yet; the connection ends with it."""
    request_id = secrets.token_hex(8)
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
    return last_words("QUEUE_FULL", "there are too many connections; try again", headers=b"retry-after: 1\r\n")
