"""Return of the C library's free memory to the system after bodies, and garbage collection.

Owns: the time of both. Must not know bodies: the budget tells how many bytes there were, and when all are gone.

Large messages arrive in many pieces, which lie between lasting objects. The C library keeps the free pages between them
for later, and never gives them back by itself: a flood of 20 MB messages would leave the server a hundred megabytes
larger for ever.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable

from app.ingress.budget import Budget
from backends.host import release_free_memory, return_large_blocks

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
