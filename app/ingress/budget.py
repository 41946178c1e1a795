"""Budgets for all clients together, and each client's part; and the return of free memory once no body is held.

Owns: the rule that divides bytes, connections, calls and listeners, and the time of garbage collection. Must not know
transports: HTTP and gRPC draw on one budget.

Large messages arrive in many pieces, which lie between lasting objects. The C library keeps the free pages between them
for later, and never gives them back by itself: a flood of 20 MB messages would leave the server a hundred megabytes
larger for ever.
"""

from __future__ import annotations

import asyncio
import gc
from collections import deque
from collections.abc import Callable

from app.access.access import ClientLease
from app.errors import ServiceError
from backends.host import release_free_memory, return_large_blocks

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
        if not self._taken(client, size):
            whose = "" if self.held + size > self.limit else " from one client"
            raise ServiceError("QUEUE_FULL", f"too many {self._what}{whose} at once; try again", retry_after_s=1)

    async def wait(self, client: str, size: int) -> None:
        """Take `size` as soon as it is free; first come, first served."""
        if not self._waiting and self._taken(client, size):
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

    def _taken(self, client: str, size: int) -> bool:
        free, mine = self.limit - self.held - size, self._by_client.get(client, 0) + size
        if free < 0 or mine > self._most(free):
            return False
        self.held += size
        self._by_client[client] = mine
        return True

    def _most(self, free: int) -> int:
        """Return the most that one client may hold while so much is free."""
        return max(self._least, _SHARE * (free - self._spare))

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
            if self._taken(waiting, wanted):  # Else its client has enough: others go before it.
                self._waiting.remove(entry)
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
        if self._client_lease is not None:
            self._client_lease.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        if self.held_bytes:
            self._budget.total += self.held_bytes
            self._budget.give(self._client, self.held_bytes)
            self.held_bytes = 0
        if self._client_lease is not None:
            self._client_lease.__exit__()


_WORTH_BYTES = 16 << 20
"""Sum of bytes of bodies after which a release is worth while."""
_QUIET_S = 1.0
_LARGE_BYTES = 4 << 20
"""Size from which bodies and answers go back at once: the pages of a new one cost less than filling them."""
_NEW_OBJECTS, _YOUNG_COLLECTIONS = 5_000, 4
"""Thresholds of the collector: so many new objects start a collection, and so many collections start one of older
objects. With Python's 700, a few requests in flight start collections that find nothing, for a twentieth of a request's
time. With 20,000 and 10 one collection stopped the event loop for up to 80 ms."""


def freeze() -> None:
    """Collect garbage, and exempt all present objects from later collections.

    A collection over them would stop every request for a tenth of a second: torch alone has hundreds of thousands of
    objects.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_NEW_OBJECTS, _YOUNG_COLLECTIONS)


def _release() -> None:
    # Only after `freeze` a collection takes milliseconds. Not `gc.get_freeze_count()`: that walks over all that is
    # frozen, and nothing else runs for 50 ms.
    if gc.get_threshold()[0] == _NEW_OBJECTS:
        gc.collect()
    release_free_memory()


class Trim:
    """Trimmer of this process. `release` frees memory, in a thread, once no body was held for `quiet_s` seconds."""

    def __init__(self, bodies: Budget, release: Callable[[], None] = _release, quiet_s: float = _QUIET_S) -> None:
        self._bodies, self._release, self._quiet_s = bodies, release, quiet_s
        self._timer: asyncio.TimerHandle | None = None
        self._releasing: asyncio.Task[None] | None = None
        self._released_at_bytes = 0
        return_large_blocks(_LARGE_BYTES)
        bodies.on_empty = self._emptied

    async def close(self) -> None:
        """End a release in progress. Idempotent."""
        self._bodies.on_empty = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._releasing is not None:
            await self._releasing

    def _emptied(self) -> None:
        if self._timer is None and self._bodies.total - self._released_at_bytes >= _WORTH_BYTES:
            self._timer = asyncio.get_running_loop().call_later(self._quiet_s, self._quiet)

    def _quiet(self) -> None:
        # If bodies are held again, this waits for the next moment without one.
        self._timer = None
        if self._bodies.held == 0 and (self._releasing is None or self._releasing.done()):
            self._released_at_bytes = self._bodies.total
            self._releasing = asyncio.create_task(asyncio.to_thread(self._release), name="release of the heap")
