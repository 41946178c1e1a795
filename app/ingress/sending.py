"""Answers that their client does not read: how long they are kept.

Owns: the least rate at which a client takes what it is sent. How many bytes may wait for clients is the budget's
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
"""Large answers are given to TLS in such pieces: it would encrypt, and keep, all of one in a turn of the event loop."""
PLAIN_PIECE_BYTES = 1024 * 1024
"""And to the system in such ones: one call sends all to a client that takes it as fast, and 100 MB take 100 ms."""
LEAST_BYTES_PER_S = 4096
PERIOD_S = 10.0
"""The rate is looked at over so long: a system tells of what it has taken in pieces, on loopback of 64 KiB."""
_STOOD_STILL_S = 0.25
"""How late a timer is after a time in which this process was stopped: then the client is not to blame."""
_AT_ONCE = struct.pack("ii", 1, 0)
"""With it a closed socket is reset, and what it had not yet sent is dropped."""
_ACKED_AT = 120
"""Where Linux's `struct tcp_info` has `tcpi_bytes_acked`."""


class SendWatch:
    """Of one connection: ends it when its client takes less than the least rate of what waits for it."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._taken = self._unsent = 0

    def begin(self) -> None:
        """Bytes wait for the client."""
        if self._timer is None:
            self._arm()

    def end(self) -> None:
        """None do any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self) -> None:
        self._taken, self._unsent = _acknowledged_bytes(self._transport), self._transport.get_write_buffer_size()
        self._due_s = self._loop.time() + PERIOD_S
        self._timer = self._loop.call_later(PERIOD_S, self._look)

    def _look(self) -> None:
        # Where the system does not say what the client has, what has left this process stands for it.
        taken = max(
            _acknowledged_bytes(self._transport) - self._taken, self._unsent - self._transport.get_write_buffer_size()
        )
        if taken < LEAST_BYTES_PER_S * PERIOD_S and self._loop.time() - self._due_s < _STOOD_STILL_S:
            log.debug("a client took %d bytes of its answer in %g s: its connection is closed", taken, PERIOD_S)
            self._timer = None
            with contextlib.suppress(OSError, AttributeError):  # Else the system would keep what it has, and try on.
                self._transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
            self._transport.abort()
        else:
            self._arm()


def _acknowledged_bytes(transport: asyncio.Transport) -> int:
    """What the client's system has taken since the connection began; 0 where ours does not say.

    The transport knows only what it has handed to the system, which keeps megabytes of it, and asks for more when a
    third of them has gone: that may take a slow client minutes.
    """
    with contextlib.suppress(OSError, AttributeError, struct.error):
        told = transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _ACKED_AT + 8)
        (acknowledged,) = struct.unpack_from("=Q", told, _ACKED_AT)
        return int(acknowledged)
    return 0
