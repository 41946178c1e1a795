"""gRPC's connections and calls: counted when they begin, and relayed to gRPC's C core.

    client ──TCP──► Listener, which counts ──► Connection ──Unix socket──► C core: TLS, HTTP/2

The C core accepts every connection, and limits neither an address nor unread bytes. So it listens where only this
process finds it. Its end of a connection has the client's address in its name, and so has each call.
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

from app.access.access import client_of
from app.errors import ServiceError
from app.ingress.budget import Budget, Lease
from app.ingress.listener import Listener
from app.ingress.sending import LEAST_BYTES_PER_S, PERIOD_S, SendWatch
from app.ingress.tunnel import Tunnel

log = logging.getLogger("anychip.rpc")

_KEEPALIVE = ((socket.TCP_KEEPIDLE, 60), (socket.TCP_KEEPINTVL, 20), (socket.TCP_KEEPCNT, 3))
"""Keepalive settings: a client that has vanished is noticed after two minutes."""

_SOON_S = 1.0
"""Time after which an answer is watched: nearly all have been sent by then."""
_FEW_CALLS = 16


class Connection(asyncio.Protocol):
    """A client's connection. `address`: its source, without the port; `client`: the key by which it is counted."""

    on_lost: Callable[[Any], None]
    address = client = ""

    def __init__(self, relay: Relay) -> None:
        self.name = secrets.token_hex(8)
        self._relay = relay
        self._late = 0  # Number of late answers.
        self._blocked = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.core = Tunnel(self.transport, self.end)
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
        self._sending.end()
        self.core.abort()
        self._relay.lost(self)
        self.on_lost(self)

    def data_received(self, data: bytes) -> None:
        self.core.send(data)

    def pause_writing(self) -> None:
        """Pause the C core: the client does not read as fast as it is answered."""
        self._blocked = True
        self._sending.begin()
        self.core.pause(on=True)

    def resume_writing(self) -> None:
        """Resume the C core: the client reads again."""
        self._blocked = False
        self._rest()
        self.core.pause(on=False)

    def answer_begins(self, size: int) -> Callable[[], None]:
        """Watch the sending of an answer; return the function to call at its end. Cuts off too slow a client."""
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
        self.transport.abort()


class Relay:
    """Relay of one server. `listener`: of the connections of its clients."""

    def __init__(self, connections: Budget, most_calls: int) -> None:
        """Set the limits: `connections` counts them; `most_calls`, and as many again that are being refused."""
        least = min(_FEW_CALLS, most_calls // 4)
        self.calls = Budget(2 * most_calls, "calls", least=least, spare=most_calls // 8)
        self.listener = Listener(lambda: Connection(self), connections)
        self._open: dict[str, Connection] = {}
        self._beginning: set[asyncio.Task[None]] = set()
        self._empty = asyncio.Event()
        self._core = -1

    @contextlib.contextmanager
    def core(self) -> Iterator[str]:
        """Yield the C core's address to listen at, within the context; afterwards only this relay reaches it."""
        with tempfile.TemporaryDirectory(prefix="anychip-") as folder:
            yield f"unix:{folder}/grpc"
            self._core = os.open(f"{folder}/grpc", os.O_PATH | os.O_CLOEXEC)

    async def wait_closed(self, within_s: float) -> None:
        """Wait until the C core has closed every connection and clients have read the rest; then abort the others."""
        await self.listener.wait_closed()
        self._empty.clear()
        if self._open:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._empty.wait(), within_s)
        for connection in [*self._open.values()]:
            connection.abort()
        await asyncio.gather(*self._beginning, return_exceptions=True)
        if self._core >= 0:
            os.close(self._core)

    def begin(self, call: Any) -> Connection:
        """Count a call until its task ends, when its answer has been read. Raises CancelledError: its client has gone.

        A client over its limit does not read its refusals either, so it loses its connection.
        """
        connection = self._open.get(call.peer().partition(":")[2].partition("/")[0])
        if connection is None:
            raise asyncio.CancelledError
        client = connection.client
        try:
            self.calls.take(client, 1)
        except ServiceError:
            connection.abort()
            raise asyncio.CancelledError from None
        _at_end(functools.partial(self.calls.give, client, 1))
        return connection

    def begun(self, connection: Connection) -> None:
        """Register a client's connection, and connect it to the C core."""
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
        """Forget a client's connection."""
        del self._open[connection.name]
        if not self._open:
            self._empty.set()


@functools.lru_cache(1024)
def address_in(peer: str) -> str:
    """Extract the client's address from the C core's name of a call's peer, "unix-abstract:NAME/ADDRESS"."""
    return unquote(peer.partition("/")[2])


def hold_answer(connection: Connection, size: int, lease: Lease, held: contextlib.ExitStack) -> None:
    """Hold a call's only answer, and what is held already, until its client has read it. Raises QUEUE_FULL."""
    lease.give(lease.held_bytes)
    lease.take(_room(size, lease))
    end = held.pop_all()
    end.callback(connection.answer_begins(size))
    _at_end(end.close)


@contextlib.contextmanager
def holding(connection: Connection, size: int, lease: Lease) -> Iterator[None]:
    """Hold the bytes of one of a stream's answers while it is written. Raises QUEUE_FULL."""
    room = _room(size, lease)
    lease.take(room)
    ends = connection.answer_begins(size)
    try:
        yield
    finally:
        ends()
        lease.give(room)


def _room(size: int, lease: Lease) -> int:
    """Return the bytes of the answer and gRPC's copy of it; if that exceeds one client's limit, the limit."""
    return max(size, min(2 * size, lease.most))


def _at_end(function: Callable[[], None]) -> None:
    """Call a function when the call's task ends: gRPC sends an only answer after the method has returned it.

    The call's own callbacks would keep the call, and its part of the C core, until garbage is collected.
    """
    task = asyncio.current_task()
    assert task is not None
    task.add_done_callback(lambda _: function())
