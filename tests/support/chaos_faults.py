"""Faults of processes and models in the chaos run, one after the other.

Owns: each of these faults, and the identification of a service's processes. Must not know clients, nor the results
of requests: the caller of a fault waits until the service has recovered.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Awaitable, Callable, Iterable, Sequence

import httpx
import psutil

from tests.support.load import client_at, until
from tests.support.service_process import ServiceProcess

SPARE = "spare"
"""Model that is unloaded and loaded: no innocent client asks for it."""
_SILENT_S = 3.0
"""Seconds: shorter than the heartbeat timeout of a worker."""
_PAUSED_S = 8.0
"""Seconds: longer than the heartbeat timeout of a worker."""


def converters(service: ServiceProcess) -> list[psutil.Process]:
    """Return the processes that read large requests."""
    found = []
    for child in service.children():
        with contextlib.suppress(psutil.Error):  # It has just ended.
            if "converter_main" in " ".join(child.cmdline()):
                found.append(child)
    return found


async def paused(stopped: Sequence[psutil.Process], seconds: float) -> None:
    """Stop processes for so long."""
    for process in stopped:
        process.suspend()
    await asyncio.sleep(seconds)
    for process in stopped:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.resume()


def faults(service: ServiceProcess) -> dict[str, Callable[[], Awaitable[None] | None]]:
    """Return the faults by name. Each waits for its own work, none for its consequences."""

    async def ask(path: str) -> httpx.Response:
        async with client_at(service.url) as client:
            return await client.post(f"/v2/repository/models/{path}")

    async def change(path: str, status: int = 200) -> None:
        """Ask for a change; ask again while an earlier change runs, whose client may have left."""
        while (answer := await ask(path)).status_code == 429:  # noqa: ASYNC110
            await asyncio.sleep(0.5)
        assert answer.status_code == status, answer.text

    async def reload_fails() -> None:
        before = set(service.workers())
        loading = asyncio.create_task(change("resnet50/load", 500))
        await until(lambda: len(service.workers()) > len(before) or loading.done())
        for worker in set(service.workers()) - before:
            worker.kill()
        await loading

    async def reload_left() -> None:
        before = set(service.workers())
        loading = asyncio.create_task(change("resnet50/load"))
        await until(lambda: len(service.workers()) > len(before))
        loading.cancel()
        await asyncio.gather(loading, return_exceptions=True)
        await until(lambda: before.isdisjoint(service.workers()))

    async def unloaded() -> None:
        for path in (f"{SPARE}/unload", f"{SPARE}/load"):
            await change(path)

    async def loaded_at_once() -> None:
        statuses = [429, 429]
        while statuses == [429, 429]:  # An earlier change is still under way.
            answers = await asyncio.gather(*(ask(f"{SPARE}/load") for _ in range(2)))
            statuses = sorted(answer.status_code for answer in answers)
        # Changes do not queue up: the second is refused.
        assert statuses == [200, 429], [answer.text for answer in answers]

    def each(found: Iterable[psutil.Process], act: Callable[[psutil.Process], None]) -> None:
        for process in found:
            act(process)

    def decoders() -> list[psutil.Process]:
        return [*service.named("anychip-decoder").values()]

    def parents() -> list[psutil.Process]:
        return [*service.named("fork-decoders").values()]

    def parent_frozen() -> None:
        each(parents(), freeze)
        each(decoders()[:1], kill)

    kill, freeze = psutil.Process.kill, psutil.Process.suspend
    server = psutil.Process(service.process.pid)
    return {
        "worker killed": lambda: each(service.workers(), kill),
        "worker hangs": lambda: each(service.workers(), lambda worker: worker.send_signal(signal.SIGUSR2)),
        "worker frozen": lambda: each(service.workers(), freeze),
        "decoder killed": lambda: each(decoders()[:1], kill),
        "decoder frozen": lambda: each(decoders()[:1], freeze),
        "decoders' parent killed": lambda: each(parents(), kill),
        "decoders' parent frozen, a decoder killed": parent_frozen,
        "converter killed": lambda: each(converters(service)[:1], kill),
        "converters frozen": lambda: each(converters(service), freeze),
        "server frozen for 2 s": lambda: paused([server], 2.0),
        "worker paused for 3 s": lambda: paused(service.workers(), _SILENT_S),
        "decoders paused for 3 s": lambda: paused(decoders(), _SILENT_S),
        "all processes paused for 8 s": lambda: paused([server, *service.children()], _PAUSED_S),
        "model reloaded": lambda: change("resnet50/load"),
        "reload whose new worker is killed": reload_fails,
        "reload whose client leaves": reload_left,
        "other model unloaded, and loaded": unloaded,
        "two loads of it at once": loaded_at_once,
    }
