"""Files that lie in slots for a device to decode: which models' files may, and what became of those of a batch.

Owns: whether files pass to a model's workers. They do where all of its workers decode, and not for a pause after a row
of files of which a device could decode none: each would cost a call of the device for every half of its batch, and its
batch's time, before the host decodes it after all. Must not know images, nor who decodes on the host.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from app.fleet.outcome import Pending
from app.fleet.process import Computed, WorkerProcess
from app.fleet.served_model import ModelPool
from app.processes.arena import Refill
from app.scheduling.queue import Batch, Item

REFUSED_IN_A_ROW = 64
"""Of the files of a model: more than the strange files of one request, and few beside what a card does in a second."""
PAUSE_S = 60.0

log = logging.getLogger("anychip.dispatcher")


class DeviceFiles:
    """Of `models`, whose workers are `workers` at any time; both by name, and changed by their owner."""

    def __init__(self, models: Mapping[str, ModelPool], workers: Mapping[str, WorkerProcess]) -> None:
        self._models, self._workers = models, workers
        self._in_a_row: dict[ModelPool, int] = {}
        self._pauses: dict[ModelPool, asyncio.TimerHandle] = {}

    def workers_changed(self) -> None:
        """Say of each model whether its files pass. What a device could not do, its next worker may."""
        self.stop()
        self._in_a_row.clear()
        for served in self._models.values():
            self._let_pass(served)

    def stop(self) -> None:
        """End the pauses. Idempotent."""
        for pause in self._pauses.values():
            pause.cancel()
        self._pauses.clear()

    def freed(
        self, served: ModelPool, batch: Batch[Pending], done: Computed, device: str
    ) -> Mapping[Item[Pending], Refill]:
        """Give the slots of a batch back. Not those whose files the device could not decode, while somebody waits for
        them: returns these items, each with what fills its slot anew. Counts both kinds.

        A worker is not believed that it was asked to decode what is no file.
        """
        again: dict[Item[Pending], Refill] = {}
        files = served.slots.files
        if files:
            asked = [item for item in batch.items if item.payload.slot in files]
            refused = [
                item for position, item in enumerate(batch.items) if position in done.undecoded and item in asked
            ]
            if asked:
                self._count(served, device, decoded=len(asked) - len(refused), refused=len(refused))
            again = {item: files.pop(item.payload.slot) for item in refused if not item.payload.future.done()}
        for item in batch.items:
            if item not in again:
                served.slots.give(item.payload.slot)
        return again

    def _count(self, served: ModelPool, device: str, *, decoded: int, refused: int) -> None:
        served.metrics.device_decodes(device, decoded=decoded, refused=refused)
        self._in_a_row[served] = 0 if decoded else self._in_a_row.get(served, 0) + refused
        if self._in_a_row[served] >= REFUSED_IN_A_ROW and served.passes_files:
            served.passes_files = False
            self._pauses[served] = asyncio.get_running_loop().call_later(PAUSE_S, self._end_pause, served)
            message = "%s could decode none of the last %d files for %s: the host decodes them for %g s"
            log.warning(message, device, self._in_a_row[served], served.model.name, PAUSE_S)

    def _end_pause(self, served: ModelPool) -> None:
        del self._pauses[served]
        self._in_a_row[served] = 0
        self._let_pass(served)

    def _let_pass(self, served: ModelPool) -> None:
        ready = [worker.ready for worker in self._workers.values() if worker.ready]
        loaded = [each for each in (one.loaded[served.index] for one in ready) if each]
        served.passes_files = bool(loaded) and all(each.decoding.by == "device" for each in loaded)
