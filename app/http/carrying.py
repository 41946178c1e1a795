"""A connection to an ingress in a process of its own; the owner serves all but ordinary requests of hot routes.

    client ─► HotProtocol ─► its hot requests are answered here
                  └─ the first other byte ─► the owner answers from there on, for the rest of the connection

Owns: the moment at which a connection goes on with the owner. The owner's server reads what is said on it from then on,
with all its limits (app.http.connection).
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any, TypeAlias

from app.http.connection import LimitedProtocol
from app.ingress.carrying import Carried

Carry: TypeAlias = Callable[[int, bool, socket.socket], None]
"""Function that gives the owner the end of a socket, with the connection's number and whether TLS is spoken."""


class CarryingProtocol(LimitedProtocol):
    """Protocol of a connection that may go on with the owner."""

    number = 0
    _carried: Carried | None = None

    def __init__(self, carry: Carry, *about: Any) -> None:
        super().__init__(*about)
        self._carry = carry

    @property
    def between_requests(self) -> bool:
        """True if the next byte begins a request that may be answered here."""
        return self._carried is None and super().between_requests

    def data_received(self, data: bytes) -> None:
        """Carry these bytes, and all that follow, to the owner."""
        if self._carried is None:
            try:
                ours, theirs = socket.socketpair()
            except OSError:  # No descriptor: this connection ends, and no other.
                self.raw.abort()
                return
            self.lend()
            carried = self._carried = Carried(self.raw, self.end)
            ours.setblocking(False)
            self._carry(self.number, self.encrypted, theirs)
            task: asyncio.Task[Any] = self.loop.create_task(self.loop.connect_accepted_socket(lambda: carried, ours))
            self.server_state.tasks.add(task)
            task.add_done_callback(self.server_state.tasks.discard)
        self._carried.send(data)

    def connection_lost(self, exc: Exception | None) -> None:
        """End the carrying: the client is gone."""
        if self._carried is not None:
            self._carried.abort()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Pause the owner's answer, as the client does not read: the owner sees that it does not leave."""
        super().pause_writing()
        if self._carried is not None:
            self._carried.pause(on=True)

    def resume_writing(self) -> None:
        """Let the owner's answer go on: the client reads again."""
        super().resume_writing()
        if self._carried is not None:
            self._carried.pause(on=False)
