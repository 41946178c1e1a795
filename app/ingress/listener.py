"""Listening sockets: each connection is counted before anything is read of it, TLS's handshake included.

Owns: accepting, the limit of open files that it needs, and the refusal of more connections than one address, or all,
may have. Must not know requests. One budget counts connections of all public ports (app.ingress.ingress.connections),
gRPC's as well.

A server of asyncio's accepts all connections, and reports each after its handshake: by then silent ones have taken
every descriptor.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import socket
import ssl
from collections.abc import Callable
from functools import partial
from typing import Any

from app.access.access import client_of
from app.errors import ServiceError
from app.ingress.budget import Budget

log = logging.getLogger("anychip.listener")

HANDSHAKE_S = 10.0
_BACKLOG = 2048
_AT_ONCE = 32
"""Most connections accepted in one turn of the event loop."""
_PAUSE_S = 0.1
_SAY_AGAIN_S = 60.0
_OTHERS = 256
"""Descriptors for processes, files and the administration's connections: clients leave them alone."""

Passing = Callable[[socket.socket, Callable[[], None]], bool]
"""Hook for each connection: True if another process takes it; its second argument then ends the count."""


class Listener:
    """Listener of one server; looks like asyncio's `Server` to uvicorn."""

    def __init__(
        self,
        connection: Callable[[], Any],
        connections: Budget,
        tls: ssl.SSLContext | None = None,
        refusal: bytes = b"",
    ) -> None:
        """Prepare to accept. `connection`: makes a protocol, which calls `on_lost` with itself at its end;
        `connections`: counts them; `refusal`: the bytes for a refused client without TLS.
        """
        self.sockets: list[socket.socket] = []
        self._connection, self._connections = connection, connections
        self._options: dict[str, Any] = {"ssl": tls, "ssl_handshake_timeout": HANDSHAKE_S} if tls else {}
        self._refusal = b"" if tls else refusal
        self._loop = asyncio.get_running_loop()
        self._ends: dict[Any, Callable[[], None]] = {}
        """Function that ends the count of a connection."""
        self._beginning: set[asyncio.Task[Any]] = set()
        self._logged_s = float("-inf")
        self.passing: Passing | None = None

    async def listen(self, host: str, port: int, *, reuse_port: bool = False) -> None:
        """Accept connections to a port, at all addresses of a host. Raises OSError."""
        found = await self._loop.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, address in dict.fromkeys((family, address) for family, _, _, _, address in found):
            made = socket.create_server(address, family=family, backlog=_BACKLOG, reuse_port=reuse_port)
            made.setblocking(False)
            self.sockets.append(made)
        for each in self.sockets:
            self._loop.add_reader(each, self._accept, each)

    def close(self) -> None:
        """Accept no more; connections that have begun go on."""
        for each in self.sockets:
            self._loop.remove_reader(each)
            each.close()
        self.sockets.clear()

    async def wait_closed(self) -> None:
        """End handshakes that have not finished."""
        for task in self._beginning:
            task.cancel()
        await asyncio.gather(*self._beginning, return_exceptions=True)

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(_AT_ONCE):
            try:
                accepted, address = listening.accept()
            except (BlockingIOError, InterruptedError):
                return
            except ConnectionError:
                continue  # It has left already.
            except OSError as error:  # No descriptor, or no memory, for it.
                self._say("nothing can be accepted for now: %s", error)
                self._loop.remove_reader(listening)
                self._loop.call_later(_PAUSE_S, self._go_on, listening)
                return
            accepted.setblocking(False)
            client = client_of(address[0])
            try:
                self._connections.take(client, 1)
            except ServiceError:
                self._refuse(accepted, client)
            else:
                lost = partial(self._connections.give, client, 1)
                if self.passing is None or not self.passing(accepted, lost):
                    self.begin(accepted, client, lost)

    def _go_on(self, listening: socket.socket) -> None:
        if listening in self.sockets:
            self._loop.add_reader(listening, self._accept, listening)

    def _refuse(self, accepted: socket.socket, client: str) -> None:
        self._say("connections from %s are refused: it has all it may have of them (--max-connections)", client)
        with accepted, contextlib.suppress(OSError):  # The client may not hear the reason.
            if self._refusal:
                accepted.send(self._refusal)
                accepted.shutdown(socket.SHUT_WR)
                accepted.recv(1 << 16)  # Unread bytes at the close of a socket reset the connection.

    def begin(self, accepted: socket.socket, client: str, lost: Callable[[], None], made: Any = None) -> None:
        """Serve a connection, owned from now on, and call `lost` at its end. `made`: its protocol, if there is one."""
        made = made or self._connection()
        self._ends[made] = lost
        made.on_lost = self._lost  # A function that knew `made` were a circle, left to the collection of garbage.

        def begun(task: asyncio.Task[Any]) -> None:
            self._beginning.discard(task)
            if not task.cancelled() and (error := task.exception()) is None:
                return
            if not task.cancelled():  # It has left, or its handshake failed or took too long.
                log.debug("a connection from %s did not begin: %s", client, error)
            accepted.close()
            self._lost(made)

        task = self._loop.create_task(self._loop.connect_accepted_socket(lambda: made, accepted, **self._options))
        self._beginning.add(task)
        task.add_done_callback(begun)

    def _lost(self, made: Any) -> None:
        lost = self._ends.pop(made, None)
        if lost is not None:
            lost()

    def _say(self, message: str, *about: object) -> None:
        if self._loop.time() - self._logged_s > _SAY_AGAIN_S:
            self._logged_s = self._loop.time()
            log.warning(message, *about)


def make_room(connections: int, descriptors: int = 1) -> int:
    """Raise the limit for the descriptors that connections may need; return how many connections there may be.

    `descriptors`: the most that one takes.
    """
    wanted = (descriptors + 1) * connections + _OTHERS  # Ended ones stay open for a moment.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return connections
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    room = min(connections, max(allowed // 2, allowed - _OTHERS) // descriptors)
    if room < connections:
        log.warning("only %d files may be open here: %d connections, not %d (ulimit -n)", allowed, room, connections)
    return room
