"""gRPC's connections: counted when they are accepted, and carried to gRPC's C core.

    client ──TCP──► Listener, which counts ──► Connection ──Unix socket──► C core: TLS, HTTP/2

Owns: the bytes on their way between the two, and how long a client may leave an answer unread. Must not know what they
are: calls are anychip_grpc.server's business.

The C core accepts whatever comes, and limits neither what an address has nor what it does not read. So it listens where
only this process finds it. Its end of a connection has the client's address in its name, and so has each call.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import secrets
import socket
import tempfile
from collections.abc import Callable, Iterator
from typing import Any, cast
from urllib.parse import unquote

from app.access.addresses import client_of
from app.ingress.budget import Budget
from app.ingress.carrying import Carried
from app.ingress.listener import Listener
from app.ingress.sending import LEAST_BYTES_PER_S, PERIOD_S, SendWatch

log = logging.getLogger("anychip.rpc")

_KEEPALIVE = ((socket.TCP_KEEPIDLE, 60), (socket.TCP_KEEPINTVL, 20), (socket.TCP_KEEPCNT, 3))
"""A client that is gone without a word is noticed after two minutes."""

_SOON_S = 1.0
"""Nearly all answers have been sent by then: only later ones are watched."""


class Connection(asyncio.Protocol):
    """A client's. `address`: where it comes from, without the port; `client`: what that is counted as."""

    on_lost: Callable[[Any], None]
    address = client = ""

    def __init__(self, relay: Relay) -> None:
        self.name = secrets.token_hex(8)
        self.core = Carried(self)
        self._relay = relay
        self._late = 0  # Answers.
        self._blocked = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin a connection."""
        self.transport = cast(asyncio.Transport, transport)
        self.address = (transport.get_extra_info("peername") or ("",))[0]
        self.client = client_of(self.address)
        self._sending = SendWatch(self.transport)
        accepted = transport.get_extra_info("socket")
        with contextlib.suppress(OSError):  # It has left already.
            accepted.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in _KEEPALIVE:
                accepted.setsockopt(socket.IPPROTO_TCP, option, value)
        self._relay.begun(self)

    def connection_lost(self, error: Exception | None) -> None:
        """End a connection, and with it its calls."""
        self._sending.end()
        self.core.abort()
        self._relay.lost(self)
        self.on_lost(self)

    def data_received(self, data: bytes) -> None:
        """The client sends."""
        self.core.send(data)

    def pause_writing(self) -> None:
        """The client does not read as fast as it is answered."""
        self._blocked = True
        self._sending.begin()
        self.core.pause(on=True)

    def resume_writing(self) -> None:
        """It does again."""
        self._blocked = False
        self._rest()
        self.core.pause(on=False)

    def answer_begins(self, size: int) -> Callable[[], None]:
        """An answer of so many bytes is being sent; what to call when it has been. Taken too slowly, it is the last."""
        loop = asyncio.get_running_loop()
        late = False
        timer: asyncio.TimerHandle

        def is_late() -> None:
            nonlocal late, timer
            late = True
            self._late += 1
            self._sending.begin()
            timer = loop.call_later(PERIOD_S + size / LEAST_BYTES_PER_S, self.abort)

        def ends() -> None:
            timer.cancel()
            if late:
                self._late -= 1
                self._rest()

        timer = loop.call_later(_SOON_S, is_late)
        return ends

    def _rest(self) -> None:
        if not self._blocked and not self._late:
            self._sending.end()

    def end(self) -> None:
        """Send what is left, and close."""
        if not self.transport.is_closing():
            if self.transport.get_write_buffer_size():
                self._blocked = True
                self._sending.begin()
            self.transport.close()

    def abort(self) -> None:
        """Close at once."""
        self.transport.abort()


class Relay:
    """Of one server."""

    def __init__(self, connections: Budget) -> None:
        """`connections`: counts them."""
        self._listener = Listener(lambda: Connection(self), connections)
        self._open: dict[str, Connection] = {}
        self._beginning: set[asyncio.Task[None]] = set()
        self._empty = asyncio.Event()
        self._core = -1

    @contextlib.contextmanager
    def core(self) -> Iterator[str]:
        """Where the C core is to listen, within the context; afterwards the address leads nowhere, but for this."""
        with tempfile.TemporaryDirectory(prefix="anychip-") as folder:
            yield f"unix:{folder}/grpc"
            self._core = os.open(f"{folder}/grpc", os.O_PATH | os.O_CLOEXEC)

    async def listen(self, host: str, port: int) -> None:
        """Accept what comes to a port, which others may share. Raises OSError."""
        await self._listener.listen(host, port)

    def close(self) -> None:
        """Accept no more; connections that have begun go on."""
        self._listener.close()

    async def wait_closed(self, within_s: float) -> None:
        """Until the C core has closed every connection and clients have read what is left; then they are ended."""
        await self._listener.wait_closed()
        self._empty.clear()
        if self._open:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._empty.wait(), within_s)
        for connection in [*self._open.values()]:
            connection.abort()
        await asyncio.gather(*self._beginning, return_exceptions=True)
        if self._core >= 0:
            os.close(self._core)

    def of(self, call: Any) -> Connection | None:
        """The connection that a call came on; None when that is gone."""
        return self._open.get(call.peer().partition(":")[2].partition("/")[0])

    def begun(self, connection: Connection) -> None:
        """A client's connection is there: the C core's follows."""
        self._open[connection.name] = connection
        task = asyncio.get_running_loop().create_task(self._connect(connection))
        self._beginning.add(task)
        task.add_done_callback(self._beginning.discard)

    async def _connect(self, connection: Connection) -> None:
        ours = socket.socket(socket.AF_UNIX)
        try:
            ours.setblocking(False)
            ours.bind(f"\0{connection.name}/{connection.address}")
            ours.connect(f"/proc/self/fd/{self._core}")
            loop = asyncio.get_running_loop()
            await loop.connect_accepted_socket(lambda: connection.core, ours)
        except OSError as error:
            log.warning("a connection from %s cannot be given to gRPC: %s", connection.address, error)
            ours.close()
            connection.abort()

    def lost(self, connection: Connection) -> None:
        """A client's connection is gone."""
        del self._open[connection.name]
        if not self._open:
            self._empty.set()


def address_in(peer: str) -> str:
    """The client's address in what the C core says a call comes from, "unix-abstract:NAME/ADDRESS"."""
    return _unquoted(peer.partition("/")[2])


_unquoted = functools.lru_cache(1024)(unquote)
