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
import math
import os
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass

from app import clock
from app.decoder.messages import PACKET_BYTES, Decoded, DecodePlan, Inbox, Status, answers_in
from app.decoding.waiting import PendingImage
from app.pace import Pace
from app.prepared import DECODERS
from app.processes.arena import Arena
from app.processes.fork_server import Begun, ForkServer, begin
from app.processes.packing import write_packed
from app.processes.place import Cause, ChildStatus, SupervisedChild, Supervisor

_LINES_PER_MINUTE, _LINES_AT_ONCE = 60, 20
"""Most log lines of one decoder, per minute and at once: a decoder that writes more was taken over."""

log = logging.getLogger("anychip.decoders")


def begin_fork_server(plan: DecodePlan, arena: Arena) -> Begun:
    """Start the process from which decoders of this plan are forked. Raises OSError."""
    begun = begin(DECODERS)
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


class DecoderProcess(SupervisedChild):
    """One decoder process, from its fork to its end.

    `sent`: its images, by token, in the order of dispatch, with the buffer of each, and `bytes` of them; `out`: jobs to
    send at the end of this turn of the loop. `heard_s` is of `clock.monotonic()`.
    """

    look_s, kill_s = 0.25, 4.0

    def __init__(self, of: Replicas, number: int) -> None:
        super().__init__(f"decoder {number}")
        self.free_buffers = list(range(of.plan.buffers - 1, -1, -1))
        self.inbox = Inbox(of.plan.buffers, of.plan.buffer_bytes)
        self.sent: dict[int, tuple[PendingImage, int]] = {}
        self.bytes = 0
        self.out = bytearray()
        self.heard_s = 0.0
        self.is_reserved = False
        """True if it has an image that must be its only one."""
        self.parent: int | None = None
        """Process id of the fork server that has forked it."""
        self._of = of
        self._lines = Pace(_LINES_PER_MINUTE, _LINES_AT_ONCE)
        self._loop = asyncio.get_running_loop()
        self._connection: socket.socket | None = None

    @property
    def working_on(self) -> PendingImage | None:
        """Return the image that it says it has begun and not ended."""
        token = self.inbox.working_on
        return None if token is None or token not in self.sent else self.sent[token][0]

    def add(self, token: int, image: PendingImage, buffer: int) -> None:
        """Give it an image."""
        if not self.sent:
            self.hear()
        self.sent[token] = image, buffer
        self.bytes += len(image.body)
        self.is_reserved = image.deaths > 0

    def answered(self, token: int) -> PendingImage:
        """Take back an image that it has answered. Raises KeyError."""
        image, buffer = self.sent.pop(token)
        self.bytes -= len(image.body)
        self.inbox.trim(buffer, len(image.body) + len(image.tail))
        self.free_buffers.append(buffer)
        self.is_reserved, self.has_served = False, True
        self.hear()
        return image

    def clear(self) -> list[PendingImage]:
        """Take back all images; return them."""
        images = [image for image, _ in self.sent.values()]
        self.sent.clear()
        return images

    async def begin(self) -> None:
        """Fork it; it is ready at once. Raises OSError."""
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
        self._of.ready_again()

    def disconnect(self) -> None:
        """Close its socket. Idempotent."""
        connection, self._connection = self._connection, None
        if connection is not None:
            self._loop.remove_reader(connection.fileno())
            connection.close()

    def answer_s(self) -> float:
        """Return how long it may be silent: for ever if it has no image."""
        return self._of.timeout_s() if self.sent else math.inf

    def has_work(self) -> bool:
        """Return True if it has an image."""
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
        begun, had = self.working_on, self.clear()
        self.inbox.close()
        if self.cause is Cause.STOPPED:
            self._of.left += had
        elif self.cause in (Cause.DIED, Cause.HUNG, Cause.FROZEN):
            hung = self.cause is Cause.HUNG
            # Killed from outside, as by a person or for want of memory: its image may well be innocent.
            outside = not hung and self.exit_status in (None, -signal.SIGKILL, -signal.SIGTERM)
            self._of.lost(Loss(tuple(had), None if outside else begun, hung))

    def flush(self) -> None:
        """Send the jobs of `out`; a decoder that is just dying is reported through `over`, not here."""
        jobs, self.out = self.out, bytearray()
        if self._connection is not None and jobs:
            try:
                self._connection.send(jobs)
            except OSError as error:
                self.end(f"it takes no jobs: {error}")

    def _readable(self) -> None:
        assert self._connection is not None
        try:
            packet = self._connection.recv(PACKET_BYTES)
        except BlockingIOError:
            return
        except OSError:
            packet = b""
        if not packet:
            self.end("it ended")
            return
        try:
            for answer in answers_in(packet):
                if answer.status == Status.SAID:
                    self._log(answer.text)
                else:
                    self._of.answered(self, answer)
        except Exception as error:  # Nothing this decoder says can be trusted any more.
            log.exception("%s: unreadable answer", self.name)
            self.kill(f"unreadable answer: {error}")

    def _log(self, text: str) -> None:
        """Log a decoder's line, as its own words. Raises ValueError if it says too much."""
        if self._lines.wait_s(clock.monotonic()):
            raise ValueError(f"it says more than {_LINES_PER_MINUTE} lines a minute")
        self._lines.take()
        log.warning("%s says: %s", self.name, text)


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
        self.count, self.plan, self.timeout_s = count, plan, timeout_s
        self.answered, self.lost, self.ready_again = answered, lost, ready
        self.fork_server: ForkServer
        self.left: list[PendingImage] = []
        """Images of decoders that were stopped."""
        self._arena = arena
        self._numbers = itertools.count(1)
        self._places: list[Supervisor[DecoderProcess]] = []

    @property
    def decoders(self) -> dict[int, DecoderProcess]:
        """Return the running processes, by their places."""
        return {place: each.child for place, each in enumerate(self._places) if not each.child.over.done()}

    @property
    def ready(self) -> list[DecoderProcess]:
        """Return the decoders that take jobs."""
        return [each.child for each in self._places if each.child.is_ready]

    async def start(self) -> None:
        """Start; return when every decoder is ready. Raises ChildStartError."""
        self.fork_server = ForkServer(lambda: begin_fork_server(self.plan, self._arena))
        self._places = [Supervisor(lambda: DecoderProcess(self, next(self._numbers)), log) for _ in range(self.count)]
        first = [each.ready for each in self._places]
        await asyncio.wait(first)
        for each in first:
            each.result()

    async def stop(self) -> list[PendingImage]:
        """End every process; return their images. Idempotent."""
        await asyncio.gather(*(each.stop() for each in self._places))
        if self._places:
            await self.fork_server.stop()
        left, self.left = self.left, []
        return left
