"""Bytes between a client's connection and the socket of another server of ours.

    client ◄──► its transport ◄──► Tunnel ◄──► socket ◄──► gRPC's core, or the owner's server

Owns: their transfer, with back-pressure both ways. Must not know their meaning.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast


class Tunnel(asyncio.Protocol):
    """End of the socket towards the server that answers. `transport`: None until it is connected."""

    def __init__(self, client: asyncio.Transport, end: Callable[[], None]) -> None:
        """Serve a client; `end` sends it the rest, and closes."""
        self._client, self._end = client, end
        self.transport: asyncio.Transport | None = None
        self._early = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        if self._client.is_closing():
            self.abort()
        elif self._early:
            self.transport.write(self._early)
            self._early = b""
            self._client.resume_reading()

    def connection_lost(self, error: Exception | None) -> None:
        self._end()

    def data_received(self, data: bytes) -> None:
        if not self._client.is_closing():
            self._client.write(data)

    def send(self, data: bytes) -> None:
        """Pass the client's bytes to the server."""
        if self.transport is None:  # One piece is kept until it is.
            self._early += data
            self._client.pause_reading()
        elif not self.transport.is_closing():
            self.transport.write(data)

    def pause_writing(self) -> None:
        """Pause the client: the server does not read fast enough."""
        paused(self._client, on=True)

    def resume_writing(self) -> None:
        """Let the client go on."""
        paused(self._client, on=False)

    def pause(self, *, on: bool) -> None:
        """Pause the server while the client does not read fast enough, or let it go on."""
        if self.transport is not None:
            paused(self.transport, on=on)

    def abort(self) -> None:
        """End at once."""
        if self.transport is not None:
            self.transport.abort()


def paused(transport: asyncio.Transport, *, on: bool) -> None:
    """Pause or resume the reading of a transport."""
    if not transport.is_closing():
        (transport.pause_reading if on else transport.resume_reading)()
