"""uvicorn's HTTP/1.1 connection, with each answer sent in one piece.

Owns: when bytes leave. uvicorn writes an answer's head and its body apart, and uvloop sends each at once: two system
calls, two packets, and a client that wakes up twice. Here what is written within one turn of the loop leaves together.
Must not look at what is written.
"""

from __future__ import annotations

import asyncio
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_MOST_BYTES = 64 * 1024  # What a turn may hold back: large answers are not copied together.


class OnePieceProtocol(HttpToolsProtocol):
    """What uvicorn's `http` setting takes."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin a connection."""
        super().connection_made(cast(asyncio.Transport, _OnePiece(transport)))


class _OnePiece:
    """A transport that sends at the end of a turn; for everything but writing and closing it is the one within."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        self._parts: list[bytes] = []
        self._held_bytes = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        if not self._parts:
            self._loop.call_soon(self._send)
        self._parts.append(data)
        self._held_bytes += len(data)
        if self._held_bytes > _MOST_BYTES:
            self._send()

    def close(self) -> None:
        self._send()
        self._transport.close()

    def _send(self) -> None:
        if self._parts:
            data = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
            self._parts.clear()
            self._held_bytes = 0
            self._transport.write(data)
