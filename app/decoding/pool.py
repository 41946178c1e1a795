"""Pool of decoders: dispatch of images, their outcomes, and the processes.

    decode ─► wait (heap) ─► a decoder with a credit ─► answer ─► Placement
                 ▲                 ├─ too many pixels for now: waits again, among the large ones
                 └──── alone ◄─────┴─ it died or hung: its image is rejected, the others it had are tried again

Owns: the decoders, their fork server, sockets and credits, and what becomes of an image that one of them has.
app.decoding.waiting owns which image is next. Must not know requests or the forms of bodies, nor the later owner of a
slot. All of it runs in the event loop's thread; nothing in it costs
more than a copy of an image's bytes. No send or receive blocks: a decoder is owed at most a few small jobs, and owes at
most as many answers, so that neither socket ever fills.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import logging
import math
import os
import signal
import socket
from collections.abc import Callable, Sequence

from app import clock
from app.decoder.messages import KEPT_BYTES, PACKET_BYTES, Decoded, DecodePlan, Inbox, Job, Kind, Status
from app.decoding.waiting import (
    DecodeFailedError,
    DecodeQueue,
    DecodeQueueFullError,
    DecodeTooLateError,
    ImageLimits,
    Outcome,
    PendingImage,
)
from app.images.header import ImageTooLargeError, InvalidImageError
from app.prepared import DECODERS
from app.processes.arena import Arena
from app.processes.channel import close_all, reader, to_packet
from app.processes.fork_server import Begun, ForkServer, begin
from app.processes.packing import write_packed
from app.processes.place import Cause, ChildStatus, SupervisedChild, Supervisor
from models import Placement

log = logging.getLogger("anychip.decoders")

CREDITS = 8
"""Most images in flight with a decoder."""
_LEAST_CREDITS = 2
"""Least credits: one image being decoded, one in front of the decoder."""
_AHEAD_S = 0.008
"""Work that a decoder holds, in seconds estimated by bytes, within the bounds of the credits. It answers several small
images at once: a wake-up of this process for each would cost more than the work for one."""
_MOST_DEATHS = 3
"""Most decoders killed from outside under one image before the image is taken for the cause: the system's out-of-memory
killer comes from outside, too."""
_CREDIBLE, _ALWAYS_CREDIBLE_S = 3.0, 0.25
"""Longest credible time of an image, as a factor of the mean and as a floor. In the rest of the time something stood
still (a paused container, a stopped process), which is charged to no model."""
_ALWAYS = (1 << 64) - 1
_answers = reader(Decoded)
_PACKET = memoryview(bytearray(PACKET_BYTES))
"""Buffer for what a decoder says. One for all: it is read at once, within the same call."""


def _begin_fork_server(plan: DecodePlan, arena: Arena) -> Begun:
    """Start the process from which decoders of this plan are forked. Raises OSError."""
    begun = begin(DECODERS)
    written = write_packed(plan, "anychip-plan")
    try:
        shared = arena.descriptors()
        try:
            socket.send_fds(begun.control, [b"plan"], [written, *shared])
        finally:
            close_all(shared)
    except BaseException:
        begun.end()
        raise
    finally:
        os.close(written)
    return begun


class DecoderProcess(SupervisedChild):
    """One decoder process, from its fork to its end.

    `sent`: its images, by token, in the order of dispatch, with the buffer of each, and `bytes` of them; `out`: jobs to
    send at the end of this turn of the loop.
    """

    look_s, kill_s = 0.25, 4.0

    def __init__(self, of: Decoders, number: int) -> None:
        super().__init__(f"decoder {number}")
        self.free_buffers = list(range(of.plan.buffers - 1, -1, -1))
        self.inbox = Inbox(of.plan.buffers, of.plan.buffer_bytes)
        self.sent: dict[int, tuple[PendingImage, int]] = {}
        self.bytes = 0
        self._tokens = 0
        self.out: list[Job] = []
        self.is_reserved = False
        """True if it has an image that must be its only one."""
        self.parent: int | None = None
        """Process id of the fork server that has forked it."""
        self._of = of
        self._loop = asyncio.get_running_loop()
        self._connection: socket.socket | None = None

    async def begin(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        try:
            self.process = await self._of.fork_server.fork(theirs.fileno(), self.inbox.descriptor)
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self.parent = self._of.fork_server.pid
        self._connection = ours
        self._loop.add_reader(ours.fileno(), self._readable)
        self.move(ChildStatus.READY)
        self._of.flush_soon()

    def disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            self._loop.remove_reader(connection.fileno())
            connection.close()

    def answer_s(self) -> float:
        return self._of.queue.limits.timeout_s if self.sent else math.inf

    def has_work(self) -> bool:
        return bool(self.sent)

    def look(self) -> None:
        """Retire if an earlier fork server has forked it, and all others take jobs.

        Only children of one fork server share its memory: two decoders of two that are gone take 300 MiB more.
        """
        fork_server, all_ready = self._of.fork_server, len(self._of.ready) == self._of.count
        if all_ready and fork_server.ready and self.parent != fork_server.pid:
            self.retire()

    def gone(self) -> None:
        """Report its images, and the one to blame."""
        (begun, _), had = self.sent.get(self.inbox.working_on, (None, 0)), [image for image, _ in self.sent.values()]
        self.sent.clear()
        self.inbox.close()
        if self.cause is Cause.STOPPED:
            for image in had:
                self._of.queue.end(image, DecodeFailedError("the service stops"))
        elif self.cause in (Cause.DIED, Cause.HUNG, Cause.FROZEN):
            hung = self.cause is Cause.HUNG
            # Killed from outside, as by a person or for want of memory: its image may well be innocent.
            outside = not hung and self.exit_status in (None, -signal.SIGKILL, -signal.SIGTERM)
            self._of.lost(had, None if outside else begun, hung=hung)

    def give(self, image: PendingImage, now_s: float) -> None:
        """Take an image; `flush` sends its job."""
        buffer, limits, size = self.free_buffers.pop(), self._of.queue.limits, len(image.body)
        self.inbox.write(buffer, image.body, image.tail)
        self._tokens = token = (self._tokens + 1) % (1 << 31)
        if not self.sent:
            self.received_s = now_s
        self.sent[token] = image, buffer
        self.bytes += size
        self.is_reserved = image.deaths > 0
        image.sent_s = now_s
        job = Job(
            token=token,
            kind=image.kind,
            buffer=buffer,
            model=image.model,
            slot=image.slot,
            size=size + len(image.tail),
            max_pixels=limits.max_pixels,
            large_pixels=_ALWAYS if image.large else limits.large_pixels,
            width=image.width,
            height=image.height,
            tail=len(image.tail),
        )
        self.out.append(job)

    def flush(self) -> None:
        """Send the jobs of `out`; a decoder that is just dying is reported through `over`, not here."""
        jobs, self.out = self.out, []
        if self._connection is not None and jobs:
            try:
                self._connection.send(to_packet(jobs))
            except OSError as error:
                self.end(f"it takes no jobs: {error}")

    def _readable(self) -> None:
        assert self._connection is not None
        try:
            size = self._connection.recv_into(_PACKET)
        except BlockingIOError:
            return
        except OSError:
            size = 0
        if not size:
            self.end("it ended")
            return
        try:
            answers = _answers(_PACKET[:size])
            if not answers:  # These alone would be bounded by nothing.
                raise ValueError("it says nothing")
            for answer in answers:
                self._of.answered(self, answer)
        except Exception as error:  # Nothing this decoder says can be trusted any more.
            log.exception("%s: unreadable answer", self.name)
            self.kill(f"unreadable answer: {error}")


class Decoders:
    """Pool of decoders. Made, started and stopped inside one running event loop."""

    def __init__(
        self,
        plan: DecodePlan,
        arena: Arena,
        count: int,
        limits: ImageLimits,
        *,
        restarted: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Make a pool of `count` processes; at least two run, as one must stay free of large images. `restarted`: hears
        "died" or "hung" for each decoder that is replaced.
        """
        self.count, self.plan = max(2, count), plan
        self.queue = DecodeQueue(len(plan.models), self.count, limits)
        self.fork_server: ForkServer
        self._arena, self._restarted = arena, restarted
        self._loop = asyncio.get_running_loop()
        self._most_credits = min(CREDITS, plan.buffers)
        self._numbers = itertools.count(1)
        self._places: list[Supervisor[DecoderProcess]] = []
        self._flushing = False
        self._rejecting: set[asyncio.Task[None]] = set()

    @property
    def ready(self) -> list[DecoderProcess]:
        """Return the decoders that take jobs."""
        return [each.child for each in self._places if each.child.status is ChildStatus.READY]

    async def start(self) -> None:
        """Start; return when every decoder is ready. Raises ChildStartError."""
        self.fork_server = ForkServer(lambda: _begin_fork_server(self.plan, self._arena))
        self._places = [Supervisor(lambda: DecoderProcess(self, next(self._numbers)), log) for _ in range(self.count)]
        first = [each.ready for each in self._places]
        await asyncio.wait(first)
        for each in first:
            each.result()

    async def stop(self) -> None:
        """End every process; images in flight fail. Idempotent."""
        await asyncio.gather(*(each.stop() for each in self._places))
        if self._places:
            await self.fork_server.stop()
        await asyncio.gather(*self._rejecting)
        while (waiting := self.queue.pop()) is not None:
            self.queue.end(waiting, DecodeFailedError("the service stops"))

    def decode(self, image: PendingImage, *, client: str = "", again: bool = False) -> None:
        """Decode an image; its `ended` is called once, perhaps before this returns.

        Images of one `client` queue behind each other. `again`: it was admitted before, so the queue's limit does not
        count. Without a placement `ended` hears DecodeQueueFullError, DecodeTooLateError, InvalidImageError,
        ImageTooLargeError or DecodeFailedError.
        """
        if image.kind is Kind.PIXELS:
            image.pixels = image.width * image.height
        try:
            self.queue.add(image, client, clock.monotonic(), again=again)
        except DecodeQueueFullError as error:
            image.ended(image, error)
            return
        self.flush_soon()

    def drop(self, image: PendingImage) -> None:
        """Note that a waiter has left. An image without waiters leaves the queue, if it is still there."""
        image.wanted -= 1
        if not image.wanted and self.queue.discard(image):
            self.queue.end(image, DecodeFailedError("it is not wanted any more"))

    def flush_soon(self) -> None:
        """Send the jobs once a turn of the loop: those that come in one turn go in one packet."""
        if not self._flushing:
            self._flushing = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing = False
        now_s, ready = clock.monotonic(), self.ready
        while self.queue.waiting:
            decoder = self._next_decoder(ready)
            if decoder is None:
                break
            image = self.queue.pop()
            if image is None:
                break
            if image.deaths and decoder.sent:
                # It wants a decoder of its own; there is one as soon as one has nothing left.
                idle = next((each for each in ready if not each.sent), None)
                if idle is None:
                    self.queue.push(image)
                    break
                decoder = idle
            if self.queue.waiting and self.queue.is_hopeless(image, len(decoder.sent), now_s):
                self.queue.end(image, DecodeTooLateError())
                continue
            decoder.give(image, now_s)
        for decoder in ready:
            if decoder.out:
                decoder.flush()

    def _next_decoder(self, ready: Sequence[DecoderProcess]) -> DecoderProcess | None:
        best = None
        image_s = self.queue.image_s.value
        ahead_bytes = self.queue.image_bytes.value * _AHEAD_S / image_s if image_s else 0.0
        for decoder in ready:
            if not decoder.is_reserved and (best is None or decoder.bytes < best.bytes):
                images = len(decoder.sent)
                if images < _LEAST_CREDITS or (images < self._most_credits and decoder.bytes < ahead_bytes):
                    best = decoder
        return best

    def answered(self, decoder: DecoderProcess, answer: Decoded) -> None:
        """Handle an answer. Raises KeyError for a job that this decoder does not have."""
        image, buffer = decoder.sent.pop(answer.token)
        size = len(image.body) + len(image.tail)
        if size > KEPT_BYTES:
            decoder.inbox.trim(buffer, size)
        decoder.bytes -= len(image.body)
        decoder.free_buffers.append(buffer)
        decoder.is_reserved, decoder.has_served = False, True
        now_s = clock.monotonic()
        credible_s = max(_CREDIBLE * self.queue.image_s.value, _ALWAYS_CREDIBLE_S)
        taken_s = min(now_s - max(image.sent_s, decoder.received_s), credible_s)
        self.queue.took(image, taken_s)
        decoder.received_s = now_s
        outcome: Outcome | None
        match answer.status:
            case _ if not image.wanted:
                outcome = DecodeFailedError("it is not wanted any more")
            case Status.PLACED:
                outcome = Placement(answer.width, answer.height, answer.scale, answer.pad_x, answer.pad_y)
            case Status.LARGE:
                image.pixels, outcome = answer.width * answer.height, None
                try:
                    self.queue.enlarge(image)
                    self.queue.push(image)
                except DecodeQueueFullError as error:
                    outcome = error
            case Status.TOO_LARGE:
                outcome = ImageTooLargeError(answer.text)
            case Status.INVALID:
                outcome = InvalidImageError(answer.text)
            case _:
                outcome = DecodeFailedError(answer.text)
        if outcome is not None:
            self.queue.end(image, outcome)
        if self.queue.waiting:
            self.flush_soon()

    def lost(self, images: Sequence[PendingImage], culprit: PendingImage | None, *, hung: bool) -> None:
        """Reject the image that is known to have ended its decoder; try the others that it had again. `hung`: it did
        not finish that image.
        """
        self._restarted("hung" if hung else "died")
        for image in images:
            image.deaths += 1
            if not image.wanted:
                self.queue.end(image, DecodeFailedError("it is not wanted any more"))
            elif image is culprit or image.deaths > _MOST_DEATHS:
                rejecting = asyncio.create_task(self._reject(image, hung=hung), name="rejection of an image")
                self._rejecting.add(rejecting)
                rejecting.add_done_callback(self._rejecting.discard)
            else:
                self.queue.push(image)
        self.flush_soon()

    async def _reject(self, image: PendingImage, *, hung: bool) -> None:
        body = image.body
        digest = await asyncio.to_thread(lambda: hashlib.sha256(body).hexdigest())
        what, sentence = ("hung", "takes too long to decode") if hung else ("died", "could not be decoded")
        log.error("a decoder %s at an image of %d bytes, sha256 %s", what, len(body), digest)
        self.queue.end(image, InvalidImageError(f"the image {sentence}"))
