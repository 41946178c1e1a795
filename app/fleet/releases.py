"""Releases of cached device memory on request.

Owns: the workers that have been asked and have not answered. A worker has at most one such request; callers that ask
meanwhile share its answer, so that they cannot fill the pipe to a worker. Must not know why memory is released.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence

from app.fleet.process import WorkerProcess
from app.link import ReturnedBytes
from app.worker.messages import Release, Released


class Releases:
    """Requests for releases and their answers: bytes returned."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._asked: dict[WorkerProcess, asyncio.Future[ReturnedBytes]] = {}

    async def release(self, workers: Sequence[WorkerProcess]) -> dict[str, ReturnedBytes]:
        """Have every worker release its caches; return bytes by worker once all have answered.

        A worker does it after the batches it has. One that ends meanwhile has returned nothing.
        """
        answers = [asyncio.shield(self._ask(worker)) for worker in workers]  # Others may wait for the same answer.
        returned = await asyncio.gather(*answers)
        return {worker.name: each for worker, each in zip(workers, returned, strict=True)}

    def released(self, worker: WorkerProcess, message: Released) -> None:
        """Pass on a worker's answer to a request; ignore a release that its memory guard wanted."""
        if message.request:
            self._answer(worker, ReturnedBytes(message.returned, message.host))

    def worker_gone(self, worker: WorkerProcess) -> None:
        """Answer a request for a worker that has ended: it returned nothing."""
        self._answer(worker, ReturnedBytes({}, {}))

    def _ask(self, worker: WorkerProcess) -> asyncio.Future[ReturnedBytes]:
        if worker not in self._asked:
            self._asked[worker] = asyncio.get_running_loop().create_future()
            worker.send(Release(next(self._numbers)))
        return self._asked[worker]

    def _answer(self, worker: WorkerProcess, returned: ReturnedBytes) -> None:
        future = self._asked.pop(worker, None)
        if future is not None:
            future.set_result(returned)
