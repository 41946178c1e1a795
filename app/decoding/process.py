"""Decoder processes and their fork server, as the event loop sees them; each place always has a decoder.

Owns: their processes and sockets, the images of each decoder, and starting, watching and replacing decoders. Must not
know the queue, nor images' outcomes: for a decoder that has ended it reports its images, and the one that ended it. No
send or receive blocks: a decoder is owed at most a few small jobs, and owes at most as many answers, so that neither
socket ever fills.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass

from app import clock
from app.decoder.messages import PACKET_BYTES, Decoded, DecodePlan, Inbox, Status, answers_in
from app.decoding.waiting import PendingImage
from app.pace import Pace
from app.processes.arena import Arena
from app.processes.fork_server import BACKOFF_S, Begun, Child, ForkServer, begin
from app.processes.forking import is_stopped
from app.processes.packing import write_packed

_LINES_PER_MINUTE, _LINES_AT_ONCE = 60, 20
"""Most log lines of one decoder, per minute and at once: a decoder that writes more was taken over."""

log = logging.getLogger("anychip.decoders")

FORK_SERVER = "app.decoder.main:main"
"""Entry point of the fork server of decoders."""
_STATUS_TIMEOUT_S = 2.0
_WATCH_INTERVAL_S = 0.25
_STOOD_STILL_S = 1.0


class DecoderStartError(Exception):
    """The decoder processes could not be started; the message is one sentence."""


def begin_fork_server(plan: DecodePlan, arena: Arena) -> Begun:
    """Start the process from which decoders of this plan are forked. Raises OSError."""
    begun = begin(FORK_SERVER)
    written = write_packed(plan, "anychip-plan")
    try:
        shared = arena.descriptors(results=False)
        try:
            socket.send_fds(begun.control, [b"plan"], [written, *shared])
        finally:
            for each in shared:
                os.close(each)
    except BaseException:
        begun.end()
        raise
    finally:
        os.close(written)
    return begun


class DecoderProcess:
    """One decoder process, from its fork to its end.

    `sent`: its images, by token, in the order of dispatch, with the buffer of each, and `bytes` of them; `out`: jobs to
    send at the end of this turn of the loop. Seconds are of `time.monotonic()`.
    """

    def __init__(self, number: int, plan: DecodePlan, answered: Callable[[DecoderProcess, Decoded], None]) -> None:
        """Prepare a decoder; nothing runs before `start`. `answered`: hears each answer."""
        self.number = number
        self.free_buffers = list(range(plan.buffers - 1, -1, -1))
        self.inbox = Inbox(plan.buffers, plan.buffer_bytes)
        self.sent: dict[int, tuple[PendingImage, int]] = {}
        self.bytes = 0
        self.out = bytearray()
        self.heard_s = 0.0
        self.is_reserved = False
        """True if it has an image that must be its only one."""
        self.is_retiring = False
        """True if it ends after its jobs."""
        self.has_answered = False
        self._answered = answered
        self._lines = Pace(_LINES_PER_MINUTE, _LINES_AT_ONCE)
        self._loop = asyncio.get_running_loop()
        self._child: Child | None = None
        self._connection: socket.socket | None = None
        self.parent: int | None = None
        """Process id of the fork server that has forked it."""
        self.ended: asyncio.Future[str] = self._loop.create_future()
        """Reason of its end, once its socket has closed or sent unreadable bytes."""

    @property
    def pid(self) -> int | None:
        """Return the process's id, None before its start and after its end."""
        return None if self._child is None or self.ended.done() else self._child.pid

    @property
    def is_ready(self) -> bool:
        """Return True if it takes jobs."""
        return self.pid is not None and not self.is_retiring

    @property
    def working_on(self) -> PendingImage | None:
        """Return the image that it says it has begun and not ended."""
        token = self.inbox.working_on
        return None if token is None or token not in self.sent else self.sent[token][0]

    def add(self, token: int, image: PendingImage, buffer: int) -> None:
        """Give it an image."""
        self.sent[token] = image, buffer
        self.bytes += len(image.body)
        self.is_reserved = image.deaths > 0

    def answered(self, token: int) -> PendingImage:
        """Take back an image that it has answered. Raises KeyError."""
        image, buffer = self.sent.pop(token)
        self.bytes -= len(image.body)
        self.inbox.trim(buffer, len(image.body) + len(image.tail))
        self.free_buffers.append(buffer)
        self.is_reserved, self.has_answered = False, True
        return image

    def clear(self) -> list[PendingImage]:
        """Take back all images; return them."""
        images = [image for image, _ in self.sent.values()]
        self.sent.clear()
        return images

    async def start(self, fork_server: ForkServer) -> None:
        """Fork it. Raises OSError."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        try:
            self._child = await fork_server.fork(theirs.fileno(), self.inbox.descriptor)
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self.parent = fork_server.pid
        self._connection = ours
        self._loop.add_reader(ours.fileno(), self._readable)

    def flush(self) -> None:
        """Send the jobs of `out`; a decoder that is just dying is reported through `ended`, not here."""
        jobs, self.out = self.out, bytearray()
        if self._connection is not None and jobs:
            try:
                self._connection.send(jobs)
            except OSError as error:
                self._end(f"it takes no jobs: {error}")

    def kill(self, reason: str) -> None:
        """End the process now."""
        self._end(reason)
        if self._child is not None:
            self._child.kill()

    async def status(self) -> int | None:
        """Return the exit status of the process, whose socket is closed: minus the signal that ended it, None if
        unknown. Kill the process if it does not end.
        """
        if self._child is None:
            return None
        if await self._child.ends_within(_STATUS_TIMEOUT_S):
            return self._child.exited.result()
        self._child.kill()
        return None

    def close(self) -> None:
        """Close its socket and its inbox; the process ends by itself. Idempotent."""
        self._end("it was stopped")
        self.inbox.close()

    def _readable(self) -> None:
        assert self._connection is not None
        try:
            packet = self._connection.recv(PACKET_BYTES)
        except BlockingIOError:
            return
        except OSError:
            packet = b""
        if not packet:
            self._end("it ended")
            return
        try:
            for answer in answers_in(packet):
                if answer.status == Status.SAID:
                    self._log(answer.text)
                else:
                    self._answered(self, answer)
        except Exception as error:  # Nothing this decoder says can be trusted any more.
            log.exception("decoder %d: unreadable answer", self.number)
            self.kill(f"unreadable answer: {error}")

    def _log(self, text: str) -> None:
        """Log a decoder's line, as its own words. Raises ValueError if it says too much."""
        if self._lines.wait_s(clock.monotonic()):
            raise ValueError(f"it says more than {_LINES_PER_MINUTE} lines a minute")
        self._lines.take()
        log.warning("decoder %d says: %s", self.number, text)

    def _end(self, reason: str) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            self._loop.remove_reader(connection.fileno())
            connection.close()
        if not self.ended.done():
            self.ended.set_result(reason)


@dataclass(frozen=True, slots=True)
class Loss:
    """End of a decoder. `images`: its images; `culprit`: the image known to have ended it; `hung`: True if it did not
    finish that image.
    """

    images: tuple[PendingImage, ...]
    culprit: PendingImage | None
    hung: bool


class Replicas:
    """Decoders of a service. Made, started and stopped inside one running event loop."""

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
        """Prepare `count` places. `timeout_s`: time after which a decoder at work counts as hung. If `answered` raises,
        the decoder is killed. `ready`: called when a decoder takes jobs.
        """
        self.count = count
        self.decoders: dict[int, DecoderProcess] = {}
        """Running processes, by their places."""
        self.fork_server: ForkServer | None = None
        self._plan, self._arena, self._timeout_s = plan, arena, timeout_s
        self._answered, self._lost, self._ready = answered, lost, ready
        self._numbers = itertools.count(1)
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def ready(self) -> list[DecoderProcess]:
        """Return the decoders that take jobs."""
        return [decoder for decoder in self.decoders.values() if decoder.is_ready]

    async def start(self) -> None:
        """Start; return when every decoder is ready. Raises DecoderStartError."""
        fork_server = self.fork_server = ForkServer(lambda: begin_fork_server(self._plan, self._arena))
        first = [asyncio.get_running_loop().create_future() for _ in range(self.count)]
        self._tasks = [
            asyncio.create_task(self._keep(place, fork_server, ready), name=f"decoder {place}")
            for place, ready in enumerate(first)
        ]
        self._tasks.append(asyncio.create_task(self._watch(fork_server), name="decoders' watch"))
        await asyncio.gather(*first)

    async def stop(self) -> list[PendingImage]:
        """End every process; return their images. Idempotent."""
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
        """Keep a decoder in this place, and start another whenever it ends."""
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
        """Report a decoder's images, and the one to blame."""
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
        """Replace a decoder of an earlier fork server, once it has no job and all others take jobs.

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
        """Kill decoders that hang. Time in which this process itself stood still counts against no decoder."""
        looked_s = clock.monotonic()
        while True:
            await asyncio.sleep(_WATCH_INTERVAL_S)
            now_s = clock.monotonic()
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
