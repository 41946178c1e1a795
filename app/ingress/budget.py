"""Budgets for all clients together, and each client's part: bytes, connections, calls, listeners.

Owns: the rule that divides it. Must not know transports: HTTP and gRPC draw on one budget.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from app.access.limits import ClientLease
from app.errors import ServiceError

_SHARE = 3
"""Factor of the free rest that a client may hold: alone three quarters of everything, so that a quarter is left for
others, however much one client sends (dynamic thresholds, Choudhury and Hahne, 1998)."""


class Budget:
    """Budget over all clients of the resource that `what` names in messages."""

    def __init__(self, limit: int, what: str, *, least: int | None = None, spare: int = 0) -> None:
        """Make a budget of `limit`. `least`: a client's least share, if it is free; a quarter by default.

        `spare`: part of the limit for clients that hold no more than `least`: a few greedy ones never take it.
        """
        self.limit, self.held = limit, 0
        self._least = limit // 4 if least is None else least
        self._spare = spare
        self.total = 0
        """Sum of what ended requests held."""
        self.on_empty: Callable[[], None] | None = None
        """Callback for when nothing is held any more."""
        self._what = what
        self._waiting: deque[tuple[str, int, asyncio.Future[None]]] = deque()
        self._by_client: dict[str, int] = {}
        self._promised: dict[str, int] = {}
        self._all_promised = 0

    @property
    def most_for_one(self) -> int:
        """Return the most that one client can hold when it is alone."""
        return max(self._least, (self.limit - self._spare) * _SHARE // (_SHARE + 1))

    def promise(self, client: str, size: int) -> bool:
        """Promise `size` that comes later, and return True, if it would fit beside all that is held and promised. It
        ends with `fulfil`. A promise reserves nothing: a client without a promise may take it.
        """
        own, all_promised = self._promised.get(client, 0), self._all_promised
        free = self.limit - max(self.held, all_promised) - size
        mine = max(self._by_client.get(client, 0), own) + size
        if free < 0 or mine > self._most(free):
            return False
        if not size:
            return True
        self._promised[client], self._all_promised = own + size, all_promised + size
        return True

    def fulfil(self, client: str, size: int) -> None:
        """End a promise."""
        if not size:
            return
        left = self._promised[client] - size
        self._all_promised -= size
        if left:
            self._promised[client] = left
        else:
            del self._promised[client]

    def lease(self, client: str, client_lease: ClientLease | None = None) -> Lease:
        """Return a client's lease, a context manager that gives all back at its end. `client_lease` counts it, too."""
        return Lease(self, client, client_lease)

    def take(self, client: str, size: int) -> None:
        """Take `size` for a client. Raises QUEUE_FULL."""
        if not self._fits(client, size):
            whose = "" if self.held + size > self.limit else " from one client"
            raise ServiceError("QUEUE_FULL", f"too many {self._what}{whose} at once; try again", retry_after_s=1)
        self._hold(client, size)

    async def wait(self, client: str, size: int) -> None:
        """Take `size` as soon as it is free; first come, first served."""
        if not self._waiting and self._fits(client, size):
            self._hold(client, size)
            return
        given: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = client, size, given
        self._waiting.append(entry)
        try:
            await given
        except asyncio.CancelledError:
            if given.done() and not given.cancelled():
                self.give(client, size)
            else:
                self._waiting.remove(entry)
            raise

    def _fits(self, client: str, size: int) -> bool:
        free = self.limit - self.held - size
        return free >= 0 and self._by_client.get(client, 0) + size <= self._most(free)

    def _most(self, free: int) -> int:
        """Return the most that one client may hold while so much is free."""
        return max(self._least, _SHARE * (free - self._spare))

    def _hold(self, client: str, size: int) -> None:
        self.held += size
        self._by_client[client] = self._by_client.get(client, 0) + size

    def give(self, client: str, size: int) -> None:
        """Give back a part that was taken."""
        self.held -= size
        left = self._by_client[client] - size
        if left:
            self._by_client[client] = left
        else:
            del self._by_client[client]  # Addresses are the clients': what holds nothing must not stay.
            if not self.held and self.on_empty is not None:
                self.on_empty()
        for entry in [*self._waiting]:
            waiting, wanted, given = entry
            if self.held + wanted > self.limit:
                break
            if self._fits(waiting, wanted):  # Else its client has enough: others go before it.
                self._waiting.remove(entry)
                self._hold(waiting, wanted)
                given.set_result(None)


class Lease:
    """Part of a budget that one request holds until its context ends."""

    __slots__ = ("_budget", "_client", "_client_lease", "held_bytes")

    def __init__(self, budget: Budget, client: str, client_lease: ClientLease | None) -> None:
        self._budget, self._client, self.held_bytes = budget, client, 0
        self._client_lease = client_lease

    @property
    def most(self) -> int:
        """Return the most that its client can hold when it is alone."""
        return self._budget.most_for_one

    def take(self, size: int) -> None:
        """Hold so many bytes more. Raises QUEUE_FULL."""
        if size:
            if self._client_lease is not None:
                self._client_lease.hold_bytes(size)
            self._budget.take(self._client, size)
            self.held_bytes += size

    async def wait(self, size: int) -> None:
        """Hold so many bytes more, as soon as they are free."""
        await self._budget.wait(self._client, size)
        self.held_bytes += size

    def give(self, size: int) -> None:
        """Give back a part."""
        if size:
            self.held_bytes -= size
            self._budget.give(self._client, size)

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: object) -> None:
        if self.held_bytes:
            self._budget.total += self.held_bytes
            self._budget.give(self._client, self.held_bytes)
            self.held_bytes = 0
