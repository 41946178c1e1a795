"""Bytes between a client's connection and the end of a socket that something else of ours answers on.

    client ◄──► its transport ◄──► Carried ◄──► socket ◄──► gRPC's core, or the owner's server

Owns: their way, in which each side waits for the other. Must not know what they are.
"""

from __future__ import annotations

import asyncio
from typing import Protocol, cast


class Client(Protocol):
    """A client's connection. `end`: sends what is left, and closes."""

    transport: asyncio.Transport

    def end(self) -> None: ...  # noqa: D102


class Carried(asyncio.Protocol):
    """Our end of what a client's connection has with what answers. `transport`: None until it is there."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self.transport: asyncio.Transport | None = None
        self._early = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin."""
        self.transport = cast(asyncio.Transport, transport)
        if self._client.transport.is_closing():
            self.abort()
        elif self._early:
            self.transport.write(self._early)
            self._early = b""
            self._client.transport.resume_reading()

    def connection_lost(self, error: Exception | None) -> None:
        """End."""
        self._client.end()

    def data_received(self, data: bytes) -> None:
        """What answers says something."""
        if not self._client.transport.is_closing():
            self._client.transport.write(data)

    def send(self, data: bytes) -> None:
        """The client says something."""
        if self.transport is None:  # One piece is kept until it is.
            self._early += data
            self._client.transport.pause_reading()
        elif not self.transport.is_closing():
            self.transport.write(data)

    def pause_writing(self) -> None:
        """What answers does not read as fast as the client says something."""
        paused(self._client.transport, on=True)

    def resume_writing(self) -> None:
        """It does again."""
        paused(self._client.transport, on=False)

    def pause(self, *, on: bool) -> None:
        """The client does not read as fast as it is answered, or does again."""
        if self.transport is not None:
            paused(self.transport, on=on)

    def abort(self) -> None:
        """End at once."""
        if self.transport is not None:
            self.transport.abort()


def paused(transport: asyncio.Transport, *, on: bool) -> None:
    """Whether a transport reads."""
    if not transport.is_closing():
        (transport.pause_reading if on else transport.resume_reading)()
