"""The nursery and the decoders as the event loop sees them.

Owns: their processes and sockets, and what a decoder has in hand. Must not know what waits. No send or receive blocks:
a decoder is owed at most a few small jobs, and owes at most as many answers, so that neither socket ever fills.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from app.decoders import main
from app.decoders.inbox import Inbox
from app.decoders.messages import PACKET_BYTES, Decoded, DecodePlan, Status, answers_in
from app.pace import Pace
from app.workers.arena import Arena
from app.workers.forking import forked
from app.workers.nursery import Nursery, reap
from app.workers.plain import packed

_LINES_PER_MINUTE, _LINES_AT_ONCE = 60, 20
"""In the log, of one decoder: who writes more was taken over."""

log = logging.getLogger("anychip.decoders")


class DecoderStartError(Exception):
    """The processes that decode could not be started; the message is one sentence."""


class DecoderNursery(Nursery):
    """The process from which decoders are forked; a dead one is replaced by its owner."""

    def __init__(self, plan: DecodePlan, arena: Arena, ended: Callable[[], None]) -> None:
        """`ended`: called once when its socket closes. Raises OSError."""
        process, control = _taken() or _spawned()
        written = os.memfd_create("anychip-plan", os.MFD_CLOEXEC)
        try:
            with open(written, "wb", closefd=False) as file:
                file.write(packed(plan)[0])
            os.lseek(written, 0, os.SEEK_SET)
            shared = arena.descriptor()
            try:
                socket.send_fds(control, [b"plan"], [written, shared])
            finally:
                os.close(shared)
        finally:
            os.close(written)
        super().__init__(process, control, ended)


_Prepared = tuple[int, socket.socket]
"""The process id of a nursery and our end of the socket to it."""

_prepared: list[_Prepared] = []


def prepare() -> None:
    """Fork a nursery from this process, whose imports it shares: it takes no time and hardly any memory.

    For a process that has one thread, has called app.decoders.main.prepare_to_decode, and is about to make a service.
    Elsewhere a nursery is a fresh process, which imports all that itself. Whoever calls it calls `discard_prepared` in
    the end.
    """
    if threading.active_count() == 1 and hasattr(os, "fork"):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        _prepared.append((forked(theirs, main.main), ours))
        theirs.close()


def discard_prepared() -> None:
    """End the nursery that no service has taken, if there is one."""
    while _prepared:
        pid, control = _prepared.pop()
        control.close()
        reap(pid)


def _taken() -> _Prepared | None:
    return _prepared.pop() if _prepared else None


def _spawned() -> _Prepared:
    """Raises OSError."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    theirs.set_inheritable(True)
    command = [sys.executable, "-m", "app.decoders.main", str(theirs.fileno())]
    try:
        pid = os.posix_spawn(
            sys.executable,
            command,
            {**os.environ, "PYTHONPATH": os.pathsep.join(_import_path())},
            file_actions=[(os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)],
        )
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
    return pid, ours


def _import_path() -> list[str]:
    """Where a child finds what this process finds; the current folder may be another there."""
    return [str(Path(entry or ".").resolve()) for entry in sys.path]


class DecoderProcess:
    """One process that decodes, from its fork to its end."""

    def __init__(self, number: int, plan: DecodePlan, answered: Callable[[Decoded], None]) -> None:
        """`answered`: hears each answer. Nothing runs before `start`."""
        self.number = number
        self.pid: int | None = None
        self.free_lanes = list(range(plan.lanes - 1, -1, -1))
        self.inbox = Inbox(plan.lanes, plan.lane_bytes)
        self._answered = answered
        self._lines = Pace(_LINES_PER_MINUTE, _LINES_AT_ONCE)
        self._loop = asyncio.get_running_loop()
        self._connection: socket.socket | None = None
        self.ended: asyncio.Future[str] = self._loop.create_future()
        """The reason, once its socket has closed or what it says cannot be read."""

    async def start(self, nursery: Nursery) -> None:
        """Fork it. Raises OSError."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        try:
            forked = nursery.fork(self.number, theirs.fileno(), self.inbox.descriptor)
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self._connection = ours
        self._loop.add_reader(ours.fileno(), self._readable)
        self.pid = await forked

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
        if self.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

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
