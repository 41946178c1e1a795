"""Places for decoders, each of which always has one or is about to.

Owns: the fork server, and starting, watching and replacing decoders. Must not know images' outcomes: of a decoder that
has ended it only says which images it had, and which of them ended it.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from app.decoder.messages import Decoded, DecodePlan
from app.decoding.image import PendingImage
from app.decoding.process import DecoderProcess, DecoderStartError, begin_fork_server
from app.decoding.waiting import Entry
from app.processes.arena import Arena
from app.processes.fork_server import BACKOFF_S, ForkServer
from app.processes.stopped import is_stopped

log = logging.getLogger("anychip.decoders")

_WATCH_INTERVAL_S = 0.25
_STOOD_STILL_S = 1.0


@dataclass(eq=False, slots=True)
class Seat:
    """One place. `sent`: what its decoder has, by token, in the order sent, with the lane of each, and `bytes` of them;
    `out`: jobs that leave at the end of this turn of the loop. Seconds are of `time.monotonic()`.
    """

    decoder: DecoderProcess | None = None
    sent: dict[int, tuple[Entry[PendingImage], int]] = field(default_factory=dict)
    bytes: int = 0
    out: bytearray = field(default_factory=bytearray)
    is_reserved: bool = False
    """Whether it has an image that must be its decoder's only one."""
    is_retiring: bool = False
    """Whether its decoder ends after the jobs that it has."""
    deaths: int = 0
    """In a row, of decoders that had answered nothing."""
    heard_s: float = 0.0

    @property
    def ready(self) -> bool:
        """Whether its decoder takes jobs."""
        return self.decoder is not None and self.decoder.pid is not None and not self.is_retiring

    def add(self, token: int, entry: Entry[PendingImage], lane: int) -> None:
        """Its decoder has this image from now on."""
        self.sent[token] = entry, lane
        self.bytes += len(entry.payload.body)
        self.is_reserved = entry.payload.deaths > 0

    def remove(self, token: int) -> tuple[Entry[PendingImage], int]:
        """Its decoder has this image no longer; returns it with its lane. Raises KeyError."""
        entry, lane = self.sent.pop(token)
        self.bytes -= len(entry.payload.body)
        self.is_reserved = False
        return entry, lane

    def clear(self) -> list[Entry[PendingImage]]:
        """Its decoder is gone; returns what it had."""
        entries = [entry for entry, _ in self.sent.values()]
        self.sent.clear()
        self.out.clear()
        self.bytes, self.is_reserved = 0, False
        return entries


@dataclass(frozen=True, slots=True)
class Loss:
    """A decoder has ended. `entries`: what it had; `culprit`: which of these is known to have ended it; `hung`: by
    never coming to an end.
    """

    entries: tuple[Entry[PendingImage], ...]
    culprit: Entry[PendingImage] | None
    hung: bool


class Seats:
    """Made, started and stopped inside one running event loop."""

    def __init__(
        self,
        count: int,
        plan: DecodePlan,
        arena: Arena,
        timeout_s: Callable[[], float],
        *,
        answered: Callable[[Seat, Decoded], None],
        lost: Callable[[Loss], None],
        ready: Callable[[], None],
    ) -> None:
        """`timeout_s`: after it a decoder that works on an image counts as hung. `answered` may raise: the decoder is
        then killed. `ready`: a decoder takes jobs.
        """
        self.all = [Seat() for _ in range(count)]
        self.fork_server: ForkServer | None = None
        self._plan, self._arena, self._timeout_s = plan, arena, timeout_s
        self._answered, self._lost, self._ready = answered, lost, ready
        self._numbers = 0
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Returns when every decoder is ready. Raises DecoderStartError."""
        fork_server = self.fork_server = ForkServer(lambda: begin_fork_server(self._plan, self._arena))
        first = [asyncio.get_running_loop().create_future() for _ in self.all]
        self._tasks = [
            asyncio.create_task(self._keep(seat, fork_server, ready), name=f"decoder {number}")
            for number, (seat, ready) in enumerate(zip(self.all, first, strict=True))
        ]
        self._tasks.append(asyncio.create_task(self._watch(fork_server), name="decoders' watch"))
        await asyncio.gather(*first)

    async def stop(self) -> list[Entry[PendingImage]]:
        """End every process; returns what they had. Idempotent."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self.fork_server is not None:
            await self.fork_server.stop()
        left = [entry for seat in self.all for entry in seat.clear()]
        decoders = [seat.decoder for seat in self.all if seat.decoder is not None]
        for decoder in decoders:
            decoder.kill("it was stopped")
            decoder.close()
        await asyncio.gather(*(decoder.status() for decoder in decoders))
        return left

    async def _keep(self, seat: Seat, fork_server: ForkServer, first: asyncio.Future[None]) -> None:
        """A decoder in this seat, and another whenever it ends."""
        while True:
            started = True
            try:
                decoder = await self._started(seat, fork_server)
            except OSError as error:
                if not first.done():
                    first.set_exception(DecoderStartError(f"no process that decodes could be started: {error}"))
                    first.exception()  # Whoever waits hears it; nobody need wait.
                    return
                log.error("no decoder could be started: %s", error)
                started = False
            else:
                if not first.done():
                    first.set_result(None)
                self._ready()
                await self._ended(seat, decoder, await asyncio.shield(decoder.ended))
            if seat.deaths > 1 or not started:
                await asyncio.sleep(BACKOFF_S[min(max(seat.deaths, 1), len(BACKOFF_S) - 1)])

    async def _started(self, seat: Seat, fork_server: ForkServer) -> DecoderProcess:
        """Raises OSError."""
        self._numbers += 1
        decoder = DecoderProcess(self._numbers, self._plan, lambda answer: self._answered(seat, answer))
        try:
            await decoder.start(fork_server)
        except BaseException:
            decoder.close()
            raise
        seat.decoder, seat.is_retiring = decoder, False
        return decoder

    async def _ended(self, seat: Seat, decoder: DecoderProcess, reason: str) -> None:
        """A decoder has ended: what it had is given back, with the image that is to blame."""
        seat.decoder = None  # At once: it takes no more images.
        if seat.is_retiring and not seat.sent:
            decoder.close()
            await decoder.status()
            return
        seat.deaths += 1
        try:
            status = await decoder.status()
            working_on = decoder.inbox.working_on
        finally:
            decoder.close()
        begun = None if working_on is None or working_on not in seat.sent else seat.sent[working_on][0]
        had = seat.clear()
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
        for seat in self.all:
            if seat.decoder is None or seat.decoder.parent == fork_server.pid:
                continue
            if not seat.is_retiring and all(each.ready for each in self.all):
                seat.is_retiring = True
            if seat.is_retiring and not seat.sent:
                seat.decoder.close()

    async def _watch(self, fork_server: ForkServer) -> None:
        """Kill a decoder that hangs. Time in which this process itself stood still counts against nobody."""
        looked_s = time.monotonic()
        while True:
            await asyncio.sleep(_WATCH_INTERVAL_S)
            now_s = time.monotonic()
            stood_still = now_s - looked_s - _WATCH_INTERVAL_S > _STOOD_STILL_S
            looked_s = now_s
            self._retire_one(fork_server)
            for seat in self.all:
                if not seat.sent or seat.decoder is None:
                    continue
                if stood_still:
                    seat.heard_s = now_s
                elif now_s - seat.heard_s > self._timeout_s():
                    # One that somebody has stopped (SIGSTOP, a debugger) blames no image.
                    kind = "was stopped from outside" if is_stopped(seat.decoder.pid) else "hung"
                    seat.decoder.kill(f"it {kind}: no answer for {now_s - seat.heard_s:.1f} s")
