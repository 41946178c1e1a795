"""The fork server and the decoders as the event loop sees them.

Owns: their processes and sockets, and which images a decoder has. Must not know what waits. No send or receive blocks:
a decoder is owed at most a few small jobs, and owes at most as many answers, so that neither socket ever fills.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Callable

from app.decoder.inbox import Inbox
from app.decoder.messages import PACKET_BYTES, Decoded, DecodePlan, Status, answers_in
from app.decoding.image import PendingImage
from app.pace import Pace
from app.processes.arena import Arena
from app.processes.fork_server import Begun, Child, ForkServer, begin
from app.processes.packing import write_packed

_LINES_PER_MINUTE, _LINES_AT_ONCE = 60, 20
"""In the log, of one decoder: one that writes more was taken over."""

log = logging.getLogger("anychip.decoders")


FORK_SERVER = "app.decoder.main:main"
"""What the fork server of decoders runs."""
_STATUS_TIMEOUT_S = 2.0


class DecoderStartError(Exception):
    """The processes that decode could not be started; the message is one sentence."""


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
    """One process that decodes, from its fork to its end.

    `sent`: the images that it has, by token, in the order sent, with the buffer of each, and `bytes` of them; `out`:
    jobs that leave at the end of this turn of the loop. Seconds are of `time.monotonic()`.
    """

    def __init__(self, number: int, plan: DecodePlan, answered: Callable[[DecoderProcess, Decoded], None]) -> None:
        """`answered`: hears each answer. Nothing runs before `start`."""
        self.number = number
        self.free_buffers = list(range(plan.buffers - 1, -1, -1))
        self.inbox = Inbox(plan.buffers, plan.buffer_bytes)
        self.sent: dict[int, tuple[PendingImage, int]] = {}
        self.bytes = 0
        self.out = bytearray()
        self.heard_s = 0.0
        self.is_reserved = False
        """Whether it has an image that must be its only one."""
        self.is_retiring = False
        """Whether it ends after the jobs that it has."""
        self.has_answered = False
        self._answered = answered
        self._lines = Pace(_LINES_PER_MINUTE, _LINES_AT_ONCE)
        self._loop = asyncio.get_running_loop()
        self._child: Child | None = None
        self._connection: socket.socket | None = None
        self.parent: int | None = None
        """The process id of the fork server that has forked it."""
        self.ended: asyncio.Future[str] = self._loop.create_future()
        """The reason, once its socket has closed or what it says cannot be read."""

    @property
    def pid(self) -> int | None:
        """The process's id, None before its start and once it has ended."""
        return None if self._child is None or self.ended.done() else self._child.pid

    @property
    def is_ready(self) -> bool:
        """Whether it takes jobs."""
        return self.pid is not None and not self.is_retiring

    @property
    def working_on(self) -> PendingImage | None:
        """The image that it has begun and not ended, by what it says itself."""
        token = self.inbox.working_on
        return None if token is None or token not in self.sent else self.sent[token][0]

    def add(self, token: int, image: PendingImage, buffer: int) -> None:
        """It has this image from now on."""
        self.sent[token] = image, buffer
        self.bytes += len(image.body)
        self.is_reserved = image.deaths > 0

    def answered(self, token: int) -> PendingImage:
        """It has answered for this image, and has it no longer. Raises KeyError."""
        image, buffer = self.sent.pop(token)
        self.bytes -= len(image.body)
        self.inbox.trim(buffer, len(image.body) + len(image.tail))
        self.free_buffers.append(buffer)
        self.is_reserved, self.has_answered = False, True
        return image

    def clear(self) -> list[PendingImage]:
        """It has no image any more; returns those that it had."""
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
        """How the process has ended, whose socket is closed: its exit status, minus the signal that ended it; None when
        that is not to be had. It is killed should it go on.
        """
        if self._child is None:
            return None
        if await self._child.ends_within(_STATUS_TIMEOUT_S):
            return self._child.exited.result()
        self._child.kill()
        return None

    def close(self) -> None:
        """Give its socket and its inbox back; the process ends by itself. Idempotent."""
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
        """Write what the decoder says, as its own words. Raises ValueError when it says too much."""
        if self._lines.wait_s(time.monotonic()):
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
