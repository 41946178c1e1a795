"""Images whose files a device could not decode, or may have ended a worker with: decoded on the host, and queued again.

Owns: the tasks that do it, each until its item is back in the queue or has failed. Must not know images: what fills a
slot anew came with it (app.workers.arena.FreeSlots.files).

Nothing here is cancelled when a client leaves: whoever decodes then still has the slot, and it ends with its deadline.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping

from app.errors import ServiceError
from app.scheduling.outcome import Pending
from app.scheduling.queue import Batch, Item
from app.scheduling.served_model import ServedModel
from app.workers.arena import Refill
from app.workers.process import Computed, WorkerProcess

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


def freed(served: ServedModel, batch: Batch[Pending], done: Computed, device: str) -> Mapping[Item[Pending], Refill]:
    """Give the slots of a batch back. Not those whose files the device could not decode, while somebody waits for them:
    returns these items, each with what fills its slot anew. Counts both kinds.

    A worker is not believed that it was asked to decode what is no file.
    """
    again: dict[Item[Pending], Refill] = {}
    files = served.slots.files
    if files:
        asked = [item for item in batch.items if item.payload.slot in files]
        refused = [item for position, item in enumerate(batch.items) if position in done.undecoded and item in asked]
        if asked:
            served.metrics.device_decodes(device, decoded=len(asked) - len(refused), refused=len(refused))
        again = {item: files.pop(item.payload.slot) for item in refused if not item.payload.future.done()}
    for item in batch.items:
        if item not in again:
            served.slots.give(item.payload.slot)
    return again


def let_files_pass(served_models: Iterable[ServedModel], workers: Iterable[WorkerProcess]) -> None:
    """Say of each model whether all of its workers decode its files."""
    ready = [worker.ready for worker in workers if worker.ready]
    for served in served_models:
        loaded = [each for each in (one.loaded[served.index] for one in ready) if each]
        served.passes_files = bool(loaded) and all(each.decoding.by == "device" for each in loaded)
