"""Replicas of the decoder: places that always have a process that decodes, or are about to have one.

Owns: the fork server, and starting, watching and replacing decoders. Must not know images' outcomes: of a decoder that
has ended it only says which images it had, and which of them ended it.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

from app.decoder.messages import Decoded, DecodePlan
from app.decoding.image import PendingImage
from app.decoding.process import DecoderProcess, DecoderStartError, begin_fork_server
from app.processes.arena import Arena
from app.processes.fork_server import BACKOFF_S, ForkServer
from app.processes.forking import is_stopped

log = logging.getLogger("anychip.decoders")

_WATCH_INTERVAL_S = 0.25
_STOOD_STILL_S = 1.0


@dataclass(frozen=True, slots=True)
class Loss:
    """A decoder has ended. `images`: what it had; `culprit`: which of these is known to have ended it; `hung`: by
    never coming to an end.
    """

    images: tuple[PendingImage, ...]
    culprit: PendingImage | None
    hung: bool


class Replicas:
    """Made, started and stopped inside one running event loop."""

    def __init__(
        self,
        count: int,
        plan: DecodePlan,
        arena: Arena,
        timeout_s: Callable[[], float],
        *,
        answered: Callable[[DecoderProcess, Decoded], None],
        lost: Callable[[Loss], None],
        ready: Callable[[], None],
    ) -> None:
        """`timeout_s`: after it a decoder that works on an image counts as hung. `answered` may raise: the decoder is
        then killed. `ready`: a decoder takes jobs.
        """
        self.count = count
        self.decoders: dict[int, DecoderProcess] = {}
        """The processes that there are, by their places."""
        self.fork_server: ForkServer | None = None
        self._plan, self._arena, self._timeout_s = plan, arena, timeout_s
        self._answered, self._lost, self._ready = answered, lost, ready
        self._numbers = itertools.count(1)
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def ready(self) -> list[DecoderProcess]:
        """Those that take jobs."""
        return [decoder for decoder in self.decoders.values() if decoder.is_ready]

    async def start(self) -> None:
        """Returns when every decoder is ready. Raises DecoderStartError."""
        fork_server = self.fork_server = ForkServer(lambda: begin_fork_server(self._plan, self._arena))
        first = [asyncio.get_running_loop().create_future() for _ in range(self.count)]
        self._tasks = [
            asyncio.create_task(self._keep(place, fork_server, ready), name=f"decoder {place}")
            for place, ready in enumerate(first)
        ]
        self._tasks.append(asyncio.create_task(self._watch(fork_server), name="decoders' watch"))
        await asyncio.gather(*first)

    async def stop(self) -> list[PendingImage]:
        """End every process; returns what they had. Idempotent."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self.fork_server is not None:
            await self.fork_server.stop()
        decoders = self.decoders.values()
        left = [image for decoder in decoders for image in decoder.clear()]
        for decoder in decoders:
            decoder.kill("it was stopped")
            decoder.close()
        await asyncio.gather(*(decoder.status() for decoder in decoders))
        return left

    async def _keep(self, place: int, fork_server: ForkServer, first: asyncio.Future[None]) -> None:
        """A decoder in this place, and another whenever it ends."""
        deaths = 0  # In a row, of decoders that had answered nothing.
        while True:
            started = True
            decoder = DecoderProcess(next(self._numbers), self._plan, self._answered)
            try:
                await decoder.start(fork_server)
            except BaseException as error:
                decoder.close()
                if not isinstance(error, OSError):
                    raise
                if not first.done():
                    first.set_exception(DecoderStartError(f"no process that decodes could be started: {error}"))
                    first.exception()  # Marks it as seen, should no task wait.
                    return
                log.error("no decoder could be started: %s", error)
                started = False
            else:
                self.decoders[place] = decoder
                if not first.done():
                    first.set_result(None)
                self._ready()
                reason = await asyncio.shield(decoder.ended)
                del self.decoders[place]  # At once: it takes no more images.
                if decoder.is_retiring and not decoder.sent:
                    decoder.close()
                    await decoder.status()
                else:
                    deaths = 1 if decoder.has_answered else deaths + 1
                    await self._died(decoder, reason)
            if deaths > 1 or not started:
                await asyncio.sleep(BACKOFF_S[min(max(deaths, 1), len(BACKOFF_S) - 1)])

    async def _died(self, decoder: DecoderProcess, reason: str) -> None:
        """What a decoder had is given back, with the image that is to blame."""
        try:
            status = await decoder.status()
            begun = decoder.working_on
        finally:
            decoder.close()
        had = decoder.clear()
        hung = reason.startswith("it hung")
        # Killed from outside, as by a person or for want of memory: its image may well be innocent.
        outside = not hung and status in (None, -signal.SIGKILL, -signal.SIGTERM)
        log.error("decoder %d is gone: %s (status %s); it had %d images", decoder.number, reason, status, len(had))
        self._lost(Loss(tuple(had), None if outside else begun, hung))

    def _retire_one(self, fork_server: ForkServer) -> None:
        """Replace a decoder that an earlier fork server has forked, once it has no job and all others take jobs.

        Only children of one fork server share its memory: two decoders of two that are gone take 300 MiB more.
        """
        if not fork_server.ready:
            return
        for decoder in self.decoders.values():
            if decoder.parent == fork_server.pid:
                continue
            if len(self.ready) == self.count:
                decoder.is_retiring = True
            if decoder.is_retiring and not decoder.sent:
                decoder.close()

    async def _watch(self, fork_server: ForkServer) -> None:
        """Kill a decoder that hangs. Time in which this process itself stood still is held against no decoder."""
        looked_s = time.monotonic()
        while True:
            await asyncio.sleep(_WATCH_INTERVAL_S)
            now_s = time.monotonic()
            stood_still = now_s - looked_s - _WATCH_INTERVAL_S > _STOOD_STILL_S
            looked_s = now_s
            self._retire_one(fork_server)
            for decoder in self.decoders.values():
                if not decoder.sent:
                    continue
                if stood_still:
                    decoder.heard_s = now_s
                elif now_s - decoder.heard_s > self._timeout_s():
                    # One that was stopped from outside (SIGSTOP, a debugger) blames no image.
                    kind = "was stopped from outside" if is_stopped(decoder.pid) else "hung"
                    decoder.kill(f"it {kind}: no answer for {now_s - decoder.heard_s:.1f} s")
