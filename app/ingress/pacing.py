"""Pacing: so many requests begin in one turn of the event loop, the others in the next ones, in their order.

Owns: the order of begin. Must not know what is asked. Without it a flood of requests of a few milliseconds each would
run in one turn, and all other requests would wait for it.
"""

from __future__ import annotations

import asyncio
from collections import deque


class Pacing:
    """Pacing of one event loop."""

    def __init__(self, most: int) -> None:
        """Let at most `most` requests begin in one turn of the loop."""
        self._most = self._left = most
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._renewing = False

    async def take(self) -> None:
        """Wait for the caller's turn; return at once if fewer came before it in this turn of the loop."""
        if self._left and not self._waiting:
            self._left -= 1
            self._renew_soon()
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        self._renew_soon()
        await turn

    def _renew_soon(self) -> None:
        if not self._renewing:
            self._renewing = True
            asyncio.get_running_loop().call_soon(self._renew)

    def _renew(self) -> None:
        self._renewing = False
        self._left = self._most
        while self._waiting and self._left:
            turn = self._waiting.popleft()
            if not turn.done():  # Else the request has left.
                turn.set_result(None)
                self._left -= 1
        if self._left < self._most:
            self._renew_soon()
