"""Sending of answers to slow clients: the time for which unread answers are kept.

Owns: the least rate at which a client must read its answer. The budget bounds the bytes that wait
(app.ingress.ingress). Must not know what is sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import struct

log = logging.getLogger("anychip.http")

PIECE_BYTES = 64 * 1024
"""Piece of a large answer given to TLS: it would encrypt, and keep, a whole answer in one turn of the event loop."""
PLAIN_PIECE_BYTES = 1024 * 1024
"""Piece given to the system without TLS: a fast client would take 100 MB in one call, for 100 ms."""
LEAST_BYTES_PER_S = 4096
PERIOD_S = 10.0
"""Period over which the rate is measured: a system reports progress in pieces, on loopback of 64 KiB."""
STOOD_STILL_S = 0.25
"""Lateness of a timer that shows that this process was stopped: then the client is not to blame, and what has arrived
meanwhile is read first.
"""
_AT_ONCE = struct.pack("ii", 1, 0)
"""Option of a socket: at close it is reset, and unsent bytes are dropped."""
_ACKED_AT = 120
"""Offset of `tcpi_bytes_acked` in Linux's `struct tcp_info`."""


class SendWatch:
    """Watch of one connection: ends it when its client reads a waiting answer at less than the least rate."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._taken = self._unsent = 0

    def begin(self) -> None:
        """Begin to watch: bytes wait for the client."""
        if self._timer is None:
            self._arm()

    def end(self) -> None:
        """Stop watching: no bytes wait."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self) -> None:
        self._taken, self._unsent = _acknowledged_bytes(self._transport), self._transport.get_write_buffer_size()
        self._due_s = self._loop.time() + PERIOD_S
        self._timer = self._loop.call_later(PERIOD_S, self._look)

    def _look(self) -> None:
        # If the system does not report the client's bytes, those that left this process count.
        taken = max(
            _acknowledged_bytes(self._transport) - self._taken, self._unsent - self._transport.get_write_buffer_size()
        )
        if taken < LEAST_BYTES_PER_S * PERIOD_S and self._loop.time() - self._due_s < STOOD_STILL_S:
            log.debug("a client took %d bytes of its answer in %g s: its connection is closed", taken, PERIOD_S)
            self._timer = None
            with contextlib.suppress(OSError, AttributeError):  # Else the system would keep what it has, and try on.
                self._transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
            self._transport.abort()
        else:
            self._arm()


def _acknowledged_bytes(transport: asyncio.Transport) -> int:
    """Return the bytes acknowledged by the client's system since the connection began; 0 if our system does not say.

    The transport knows only the bytes handed to the system. The system keeps megabytes, and asks for more when a third
    of them has gone: for a slow client that may take minutes.
    """
    with contextlib.suppress(OSError, AttributeError, struct.error):
        info = transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _ACKED_AT + 8)
        (acknowledged,) = struct.unpack_from("=Q", info, _ACKED_AT)
        return int(acknowledged)
    return 0
