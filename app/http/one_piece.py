"""A transport that sends what is written within one turn of the event loop together.

Owns: when bytes leave. Must not know what they are.

uvicorn writes an answer's head and its body apart, and uvloop sends each at once: two system calls, two packets, and a
client that wakes up twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

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
