"""The fork server and the decoders as the event loop sees them.

Owns: their processes and sockets, and what a decoder has in hand. Must not know what waits. No send or receive blocks:
a decoder is owed at most a few small jobs, and owes at most as many answers, so that neither socket ever fills.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
import time
from collections.abc import Callable

from app.decoder import main
from app.decoder.inbox import Inbox
from app.decoder.messages import PACKET_BYTES, Decoded, DecodePlan, Status, answers_in
from app.pace import Pace
from app.processes.arena import Arena
from app.processes.fork_server import Begun, Child, ForkServer, reap, spawned
from app.processes.forking import forked
from app.processes.packing import packed

_LINES_PER_MINUTE, _LINES_AT_ONCE = 60, 20
"""In the log, of one decoder: who writes more was taken over."""

log = logging.getLogger("anychip.decoders")


_STATUS_TIMEOUT_S = 2.0


class DecoderStartError(Exception):
    """The processes that decode could not be started; the message is one sentence."""


def begin_fork_server(plan: DecodePlan, arena: Arena) -> Begun:
    """Start the process from which decoders of this plan are forked. Raises OSError."""
    process, control = _prepared.pop() if _prepared else spawned("app.decoder.main:main")
    written = os.memfd_create("anychip-plan", os.MFD_CLOEXEC)
    try:
        with open(written, "wb", closefd=False) as file:
            file.write(packed(plan)[0])
        os.lseek(written, 0, os.SEEK_SET)
        shared = arena.descriptors(results=False)
        try:
            socket.send_fds(control, [b"plan"], [written, *shared])
        finally:
            for each in shared:
                os.close(each)
    except BaseException:
        control.close()
        reap(process)
        raise
    finally:
        os.close(written)
    return process, control


_prepared: list[Begun] = []


def prepare() -> None:
    """Fork a fork server from this process, whose imports it shares: it takes no time and hardly any memory.

    For a process that has one thread, has called app.decoder.main.prepare_to_decode, and is about to make a service.
    Elsewhere a fork server is a fresh process, which imports all that itself. Whoever calls it calls `discard_prepared`
    in the end.
    """
    if threading.active_count() == 1 and hasattr(os, "fork"):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        _prepared.append((forked(theirs, main.main), ours))
        theirs.close()


def discard_prepared() -> None:
    """End the fork server that no service has taken, if there is one."""
    while _prepared:
        pid, control = _prepared.pop()
        control.close()
        reap(pid)


class DecoderProcess:
    """One process that decodes, from its fork to its end."""

    def __init__(self, number: int, plan: DecodePlan, answered: Callable[[Decoded], None]) -> None:
        """`answered`: hears each answer. Nothing runs before `start`."""
        self.number = number
        self.free_lanes = list(range(plan.lanes - 1, -1, -1))
        self.inbox = Inbox(plan.lanes, plan.lane_bytes)
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

    def send(self, jobs: bytes) -> None:
        """A packet of jobs; a decoder that is just dying is reported through `ended`, not here."""
        if self._connection is not None:
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
        await asyncio.wait((self._child.exited,), timeout=_STATUS_TIMEOUT_S)
        if not self._child.exited.done():
            self._child.kill()
            return None
        return self._child.exited.result()

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
                    self._answered(answer)
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
