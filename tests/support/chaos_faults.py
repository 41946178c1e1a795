"""Faults of processes and models in the chaos run, one after the other.

Owns: each of these faults, and the identification of a service's processes. Must not know clients, nor the results
of requests: the caller of a fault waits until the service has recovered.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import httpx
import psutil

from tests.support.load import until
from tests.support.service_process import ServiceProcess

SPARE = "spare"
"""Model that is unloaded and loaded: no innocent client asks for it."""
_FROZEN_S = 2.0
_SILENT_S = 3.0
"""Seconds: longer than a client in a hurry waits, shorter than the heartbeat timeout of a worker."""
_PAUSED_S = 8.0
"""Seconds: longer than the heartbeat timeout of a worker."""
_LOAD_TIMEOUT_S = 240.0


@dataclass(frozen=True)
class Processes:
    """Processes of a service by kind; `fork_server` is the parent of the decoders."""

    server: psutil.Process
    workers: list[psutil.Process]
    fork_server: list[psutil.Process]
    decoders: list[psutil.Process]
    converters: list[psutil.Process]
    others: list[psutil.Process]


def processes(service: ServiceProcess) -> Processes:
    """Return the processes of a service as they are now."""
    found = Processes(psutil.Process(service.process.pid), [], [], [], [], [])
    kinds = {"anychip-worker": found.workers, "fork-decoders": found.fork_server, "anychip-decoder": found.decoders}
    for child in found.server.children(recursive=True):
        with contextlib.suppress(psutil.Error):  # It has just ended.
            if "converter_main" in " ".join(child.cmdline()):
                found.converters.append(child)
            else:
                kinds.get(child.name(), found.others).append(child)
    return found


async def paused(stopped: Sequence[psutil.Process], seconds: float) -> None:
    """Stop processes for so long."""
    for process in stopped:
        process.suspend()
    await asyncio.sleep(seconds)
    for process in stopped:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.resume()


class Faults:
    """Faults by name, in `all`. Each waits for its own work, none for its consequences."""

    def __init__(self, service: ServiceProcess) -> None:
        self._service = service
        self.all: dict[str, Callable[[], Awaitable[None]]] = {
            "worker killed": self._worker_killed,
            "worker hangs": self._worker_hangs,
            "worker frozen": self._worker_frozen,
            "decoder killed": self._decoder_killed,
            "decoder frozen": self._decoder_frozen,
            "decoders' parent killed": self._fork_server_killed,
            "decoders' parent frozen, a decoder killed": self._fork_server_frozen,
            "converter killed": self._converter_killed,
            "converters frozen": self._converters_frozen,
            "server frozen for 2 s": self._server_frozen,
            "worker paused for 3 s": self._worker_paused,
            "decoders paused for 3 s": self._decoders_paused,
            "all processes paused for 8 s": self._all_paused,
            "model reloaded": self._reloaded,
            "reload whose new worker is killed": self._reload_fails,
            "reload whose client leaves": self._reload_left,
            "other model unloaded, and loaded": self._unloaded,
            "two loads of it at once": self._loaded_at_once,
        }

    async def _worker_killed(self) -> None:
        self._service.worker().kill()

    async def _worker_hangs(self) -> None:
        self._service.worker().send_signal(signal.SIGUSR2)

    async def _worker_frozen(self) -> None:
        self._service.worker().suspend()

    async def _decoder_killed(self) -> None:
        processes(self._service).decoders[0].kill()

    async def _decoder_frozen(self) -> None:
        processes(self._service).decoders[0].suspend()

    async def _fork_server_killed(self) -> None:
        processes(self._service).fork_server[0].kill()

    async def _fork_server_frozen(self) -> None:
        found = processes(self._service)
        found.fork_server[0].suspend()
        found.decoders[0].kill()

    async def _converter_killed(self) -> None:
        for converter in processes(self._service).converters[:1]:
            converter.kill()

    async def _converters_frozen(self) -> None:
        for converter in processes(self._service).converters:
            converter.suspend()

    async def _server_frozen(self) -> None:
        server = self._service.process
        os.kill(server.pid, signal.SIGSTOP)
        await asyncio.sleep(_FROZEN_S)
        os.kill(server.pid, signal.SIGCONT)

    async def _worker_paused(self) -> None:
        await paused(self._service.workers(), _SILENT_S)

    async def _decoders_paused(self) -> None:
        await paused(processes(self._service).decoders, _SILENT_S)

    async def _all_paused(self) -> None:
        await paused([psutil.Process(self._service.process.pid), *self._service.children()], _PAUSED_S)

    async def _ask(self, path: str) -> httpx.Response:
        async with httpx.AsyncClient(base_url=self._service.url, timeout=_LOAD_TIMEOUT_S) as client:
            return await client.post(f"/v2/repository/models/{path}")

    async def _change(self, path: str) -> httpx.Response:
        """Ask for a change; ask again while an earlier change runs, whose client may have left."""
        while (answer := await self._ask(path)).status_code == 429:  # noqa: ASYNC110
            await asyncio.sleep(0.5)
        return answer

    async def _reloaded(self) -> None:
        answer = await self._change("resnet50/load")
        assert answer.status_code == 200, answer.text

    async def _reload_fails(self) -> None:
        before = {worker.pid for worker in self._service.workers()}
        loading = asyncio.create_task(self._change("resnet50/load"))
        await until(lambda: len(self._service.workers()) > len(before) or loading.done())
        for worker in self._service.workers():
            if worker.pid not in before:
                worker.kill()
        answer = await loading
        assert answer.status_code == 500, answer.text

    async def _reload_left(self) -> None:
        before = {worker.pid for worker in self._service.workers()}
        loading = asyncio.create_task(self._change("resnet50/load"))
        await until(lambda: len(self._service.workers()) > len(before))
        loading.cancel()
        await asyncio.gather(loading, return_exceptions=True)
        await until(lambda: not before & {worker.pid for worker in self._service.workers()})

    async def _loaded_at_once(self) -> None:
        while True:
            answers = await asyncio.gather(*(self._ask(f"{SPARE}/load") for _ in range(2)))
            statuses = sorted(answer.status_code for answer in answers)
            if statuses != [429, 429]:  # Else an earlier change is still under way.
                break
        # Changes do not queue up: the second is refused.
        assert statuses == [200, 429], [answer.text for answer in answers]

    async def _unloaded(self) -> None:
        for path in (f"{SPARE}/unload", f"{SPARE}/load"):
            answer = await self._change(path)
            assert answer.status_code == 200, answer.text
