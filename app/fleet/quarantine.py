"""Slots of a worker whose process cannot be killed.

Owns: that nothing which still may be written to is given to anybody else.
"""

from __future__ import annotations

import logging

from app.fleet.outcome import Pending
from app.fleet.process import WorkerProcess
from app.fleet.served_model import ModelPool
from app.processes.arena import Arena
from app.scheduling.queue import Batch

log = logging.getLogger("anychip.dispatcher")


def move_out(arena: Arena, served: ModelPool, worker: WorkerProcess, batch: Batch[Pending]) -> None:
    """The items of such a worker go on in other slots: it may still write to theirs."""
    for item in batch.items:
        left, slot = item.payload.slot, served.slots.take()
        arena.slot(served.index, slot)[:] = arena.slot(served.index, left)
        if left in served.slots.files:
            served.slots.files[slot] = served.slots.files.pop(left)
        item.payload.slot = slot
        worker.exited.add_done_callback(lambda _, left=left: served.slots.give(left))  # type: ignore[misc]
    log.warning("%d slots of %s are in quarantine until %s is gone", len(batch.items), batch.model, worker.id)
