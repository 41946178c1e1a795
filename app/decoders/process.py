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
from typing import Any

from app.decoders import main
from app.decoders.inbox import Inbox
from app.decoders.messages import (
    ENDED,
    FORKED,
    PACKET_BYTES,
    READY,
    Decoded,
    DecodePlan,
    answers_in,
    event_in,
    pack_number,
)
from app.workers.arena import Arena
from app.workers.plain import packed

log = logging.getLogger("anychip.decoders")

_STOP_TIMEOUT_S = 5.0
_STATUS_TIMEOUT_S = 2.0
"""How long the nursery may take to say how a decoder ended that has closed its socket."""


class DecoderStartError(Exception):
    """The processes that decode could not be started; the message is one sentence."""


class Nursery:
    """The process from which decoders are forked. Lives as long as the service; a dead one is replaced by its owner."""

    def __init__(self, plan: DecodePlan, arena: Arena, ended: Callable[[], None]) -> None:
        """`ended`: called once when its socket closes. Raises OSError."""
        self._ended = ended
        self._forks: dict[int, asyncio.Future[int]] = {}
        self._statuses: dict[int, asyncio.Future[int]] = {}
        self._loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[None] = self._loop.create_future()
        self._process, self._control = _taken() or _spawned()
        written = os.memfd_create("anychip-plan", os.MFD_CLOEXEC)
        try:
            with open(written, "wb", closefd=False) as file:
                file.write(packed(plan)[0])
            os.lseek(written, 0, os.SEEK_SET)
            shared = arena.descriptor()
            try:
                socket.send_fds(self._control, [b"plan"], [written, shared])
            finally:
                os.close(shared)
        finally:
            os.close(written)
        self._control.setblocking(False)
        self._loop.add_reader(self._control.fileno(), self._readable)

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process

    def fork(self, number: int, connection: socket.socket, inbox: Inbox) -> asyncio.Future[int]:
        """Ask for a decoder; the future has its process id. Raises OSError when the nursery is gone."""
        forked = self._forks[number] = self._loop.create_future()
        self._statuses[number] = self._loop.create_future()
        socket.send_fds(self._control, [pack_number(number)], [connection.fileno(), inbox.descriptor])
        return forked

    async def status(self, number: int) -> int | None:
        """How the decoder ended: its exit status, minus the signal that ended it; None when that is not to be had."""
        if number not in self._statuses:
            return None
        try:
            return await asyncio.wait_for(self._statuses[number], _STATUS_TIMEOUT_S)
        except (asyncio.TimeoutError, ConnectionError):
            return None
        finally:
            del self._statuses[number]

    def kill(self) -> None:
        """End it now, whatever it does; its decoders end with it."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process, signal.SIGKILL)

    async def stop(self) -> None:
        """End it, and every decoder with it. Idempotent."""
        self._close()
        await asyncio.to_thread(_reap, self._process)

    def _readable(self) -> None:
        try:
            packet = self._control.recv(64)
        except BlockingIOError:
            return
        except OSError:
            packet = b""
        if not packet:
            self._close()
            return
        event = event_in(packet)
        if event.kind == READY:
            if not self.ready.done():
                self.ready.set_result(None)
        elif event.kind == FORKED:
            _settle(self._forks.pop(event.number), event.value)
        elif event.kind == ENDED and event.number in self._statuses:
            _settle(self._statuses[event.number], event.value)

    def _close(self) -> None:
        if self._control.fileno() < 0:
            return
        self._loop.remove_reader(self._control.fileno())
        self._control.close()
        gone = ConnectionError("the process that forks decoders has ended")
        waited_for: list[asyncio.Future[Any]] = [self.ready, *self._forks.values(), *self._statuses.values()]
        for future in waited_for:
            if not future.done():
                future.set_exception(gone)
                future.exception()  # Whoever waits hears it; nobody need wait.
        self._ended()


_Prepared = tuple[int, socket.socket]
"""The process id of a nursery and our end of the socket to it."""

_prepared: list[_Prepared] = []


def prepare() -> None:
    """Fork a nursery from this process, whose imports it shares: it takes no time and hardly any memory.

    For a process that has one thread, has called app.decoders.main.import_libraries, and is about to make a service.
    Elsewhere a nursery is a fresh process, which imports all that itself. Whoever calls it calls `discard_prepared` in
    the end.
    """
    if threading.active_count() == 1 and hasattr(os, "fork"):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        _prepared.append((main.forked(theirs), ours))
        theirs.close()


def discard_prepared() -> None:
    """End the nursery that no service has taken, if there is one."""
    while _prepared:
        pid, control = _prepared.pop()
        control.close()
        _reap(pid)


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


def _reap(pid: int) -> None:
    """Wait for a nursery whose socket is closed; kill it should it linger. Blocks: for a thread."""
    end_s = time.monotonic() + _STOP_TIMEOUT_S
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(pid, os.WNOHANG) == (0, 0):
            if time.monotonic() > end_s:
                os.kill(pid, signal.SIGKILL)
            time.sleep(0.005)


def _settle(future: asyncio.Future[int], value: int) -> None:
    if not future.done():
        future.set_result(value)


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
        self._loop = asyncio.get_running_loop()
        self._connection: socket.socket | None = None
        self.ended: asyncio.Future[str] = self._loop.create_future()
        """The reason, once its socket has closed or what it says cannot be read."""

    async def start(self, nursery: Nursery) -> None:
        """Fork it. Raises OSError."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        try:
            forked = nursery.fork(self.number, theirs, self.inbox)
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
                self._answered(answer)
        except Exception as error:  # Nothing this decoder says can be trusted any more.
            log.exception("decoder %d: unreadable answer", self.number)
            self.kill(f"unreadable answer: {error}")

    def _end(self, reason: str) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            self._loop.remove_reader(connection.fileno())
            connection.close()
        if not self.ended.done():
            self.ended.set_result(reason)
