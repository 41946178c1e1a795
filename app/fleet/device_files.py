"""Files in slots for a device to decode: whose files may pass, and the outcome for the files of a batch.

Owns: whether files pass to a model's workers. They pass if all of its workers decode. They do not pass for a while
after a row of files of which a device could decode none: each such file would cost a device call for every half of its
batch, and its batch's time, before the host decodes it after all. Must not know images, nor the host's decoders.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence

from app.fleet.process import WorkerProcess
from app.fleet.submission import ModelPool, Submission
from app.scheduling.queue import ENDED, Batch
from app.worker.messages import Done

REFUSED_IN_A_ROW = 64
"""Undecodable files of a model before the host decodes its files for a while: more than one request may have."""
PAUSE_S = 60.0

log = logging.getLogger("anychip.dispatcher")


class DeviceFiles:
    """Files of `models`, by name, for `workers`, by id, to decode. The owner of the mappings changes them."""

    def __init__(self, models: Mapping[str, ModelPool], workers: Mapping[str, WorkerProcess]) -> None:
        self._models, self._workers = models, workers
        self._in_a_row: dict[ModelPool, int] = {}
        self._pauses: dict[ModelPool, asyncio.TimerHandle] = {}

    def workers_changed(self) -> None:
        """Decide for each model whether its files pass. A new worker may decode what the device could not before."""
        self.stop()
        self._in_a_row.clear()
        for pool in self._models.values():
            self._let_pass(pool)

    def stop(self) -> None:
        """End the pauses. Idempotent."""
        for pause in self._pauses.values():
            pause.cancel()
        self._pauses.clear()

    def refused(
        self, pool: ModelPool, batch: Batch[Submission], files: Sequence[int], done: Done, device: str
    ) -> frozenset[Submission]:
        """Return the items that are still wanted and whose files the device could not decode. Count both kinds.

        `files`: positions of the items that hold a file; others that the worker names are ignored.
        """
        undecoded = set(done.undecoded)
        refused = [batch.items[position] for position in files if position in undecoded]
        decoded = len(files) - len(refused)
        pool.metrics.device_decodes(device, decoded=decoded, refused=len(refused))
        self._in_a_row[pool] = 0 if decoded else self._in_a_row.get(pool, 0) + len(refused)
        if self._in_a_row[pool] >= REFUSED_IN_A_ROW and pool.passes_files:
            pool.passes_files = False
            self._pauses[pool] = asyncio.get_running_loop().call_later(PAUSE_S, self._end_pause, pool)
            message = "%s could decode none of the last %d files for %s: the host decodes them for %g s"
            log.warning(message, device, self._in_a_row[pool], pool.model.name, PAUSE_S)
        return frozenset([item for item in refused if item.status is not ENDED])

    def _end_pause(self, pool: ModelPool) -> None:
        del self._pauses[pool]
        self._in_a_row[pool] = 0
        self._let_pass(pool)

    def _let_pass(self, pool: ModelPool) -> None:
        ready = [worker.ready for worker in self._workers.values() if worker.ready]
        loaded = [each for each in (one.loaded[pool.index] for one in ready) if each]
        pool.passes_files = bool(loaded) and all(each.decoding.by == "device" for each in loaded)
