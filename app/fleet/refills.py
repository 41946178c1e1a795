"""Images whose files a device could not decode, or may have ended a worker with: decoded on the host, and queued again.

Owns: the tasks that do it, each until its item is back in the queue or has failed. Must not know images: what fills a
slot anew came with it (app.processes.arena.FreeSlots.files).

Nothing here is cancelled when a client leaves: whoever decodes then still has the slot, and it ends with its deadline.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from app.errors import ServiceError
from app.fleet.outcome import Pending
from app.processes.arena import Refill
from app.scheduling.queue import Item

log = logging.getLogger("anychip.dispatcher")


class Refills:
    """`requeue` is called with an item whose slot has pixels now."""

    def __init__(self, requeue: Callable[[Item[Pending]], None]) -> None:
        self._requeue = requeue
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, item: Item[Pending], refill: Refill) -> None:
        """Fill the item's slot anew. The slot is given back where that fails, and the item is answered."""
        task = asyncio.create_task(self._refilled(item, refill), name="an image again, on the host")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def stop(self) -> None:
        """End what is under way. Idempotent."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _refilled(self, item: Item[Pending], refill: Refill) -> None:
        error: ServiceError
        try:
            await refill(item.payload.slot)
        except ServiceError as refused:
            error = refused
        except Exception:
            log.exception("an image could not be decoded on the host")
            error = ServiceError("INTERNAL", "internal error; quote the request id")
        else:
            self._requeue(item)
            return
        if not item.payload.future.done():
            item.payload.future.set_exception(error)
