"""Processes of workers: forked from one that has imported what they need, or in a fresh interpreter; reaped.

Owns: the start of a process and its end, as the operating system sees them. Must not know what is said on its channel.
What touches no driver (`late_environment` in backends.vendors) is forked and goes on: a worker of the CPU is there a
second or two sooner, and shares the memory of its libraries with the others. What touches one is forked and replaced by
a fresh interpreter. Where there is a nursery, the server itself starts none: until a new program runs, whoever starts
it waits with the interpreter's lock, and on a busy machine that has taken seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import multiprocessing
import multiprocessing.process
import os
import signal
import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

from app.workers import main as worker_main
from app.workers.channel import socket_pair
from app.workers.forking import forked
from app.workers.nursery import Nursery, reap

log = logging.getLogger("anychip.workers")

KILL_TIMEOUT_S = 10.0
"""A process that has been killed and is still there after so long is inside a driver call that cannot be ended."""

_IMPORT_TIMEOUT_S = 60.0
_FORK_TIMEOUT_S = 5.0


class ChildProcess(ABC):
    """A process that waits for its first message, and our end of the socket pair to it."""

    def __init__(self, end: socket.socket, pid: int, surroundings: Mapping[str, str]) -> None:
        """`surroundings`: the environment it was started in."""
        self.socket = end
        self.pid = pid
        self.exit_code: int | None = None
        """Once it is reaped: its exit status, minus the signal that ended it; None where nobody knows."""
        self._surroundings = surroundings
        self._exited: asyncio.Future[None] | None = None
        self._pidfd = -1

    def environment(self, wanted: Mapping[str, str]) -> dict[str, str]:
        """What the process has to be told: what is wanted, and what has been set here since it was started."""
        return {**dict(os.environ.items() - self._surroundings.items()), **wanted}

    @property
    def exited(self) -> asyncio.Future[None]:
        """Done once the process is gone; to be asked for in a running event loop."""
        if self._exited is None:
            loop = asyncio.get_running_loop()
            self._exited = loop.create_future()
            self._pidfd = self._watched()
            loop.add_reader(self._pidfd, self._gone)
        return self._exited

    @abstractmethod
    def _watched(self) -> int:
        """A descriptor of ours that can be read once the process is gone."""

    def _gone(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        self._ended()
        if self._exited is not None and not self._exited.done():
            self._exited.set_result(None)

    @abstractmethod
    def _ended(self) -> None:
        """The process is gone, and its descriptor is no longer needed."""

    @abstractmethod
    def kill(self) -> None:
        """End the process now, if the system can."""

    async def reap(self, linger_s: float) -> bool:
        """Wait for the end; kill what lingers. False: the process cannot be killed, and is left behind."""
        if await self._ends_within(linger_s):
            return True
        self.kill()
        return await self._ends_within(KILL_TIMEOUT_S)

    async def _ends_within(self, limit_s: float) -> bool:
        await asyncio.wait((self.exited,), timeout=limit_s)
        return self.exited.done()


class SpawnedProcess(ChildProcess):
    """A fresh interpreter, which this process itself starts, as there is no nursery."""

    def __init__(self, name: str) -> None:
        """Raises OSError."""
        context = multiprocessing.get_context("spawn")
        ours, theirs = socket_pair()
        surroundings = dict(os.environ)
        # Should the server end in disorder, multiprocessing's own exit hook kills a daemon, too.
        self._process = context.Process(target=worker_main.main, args=(theirs,), name=name, daemon=True)
        try:
            self._process.start()
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()  # Ours would keep the socket open after the process's death.
        super().__init__(ours, self._process.pid or 0, surroundings)

    def _watched(self) -> int:
        # Not the end of the socket: a process that a worker has started may still hold that, and uvloop hears late
        # of one that ends with unread messages. multiprocessing's sentinel is a pipe, and has the same faults.
        try:
            return os.pidfd_open(self.pid)
        except OSError:  # A kernel or sandbox that has none.
            return os.dup(self._process.sentinel)

    def _ended(self) -> None:
        os.close(self._pidfd)
        self._process.join()
        self.exit_code = self._process.exitcode

    def kill(self) -> None:
        """End the process now, if the system can."""
        with contextlib.suppress(OSError):
            self._process.kill()

    async def reap(self, linger_s: float) -> bool:
        """As ChildProcess.reap."""
        if await super().reap(linger_s):
            return True
        # multiprocessing would wait for it when this process ends, for ever.
        getattr(multiprocessing.process, "_children", set()).discard(self._process)
        return False


class ForkedProcess(ChildProcess):
    """A child of the nursery, which says how it ended."""

    def __init__(self, end: socket.socket, pid: int, number: int, source: _Source, nursery: Nursery) -> None:
        """Raises OSError when it is gone already."""
        super().__init__(end, pid, source.surroundings)
        self._number, self._nursery = number, nursery
        self._handle = os.pidfd_open(pid)

    def _watched(self) -> int:
        return self._handle

    def _ended(self) -> None:
        os.close(self._handle)
        self._handle = -1

    def kill(self) -> None:
        """End the process now, if the system can. By its handle: its number may be another process's by now."""
        if self._handle >= 0:
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(self._handle, signal.SIGKILL)

    async def reap(self, linger_s: float) -> bool:
        """As ChildProcess.reap."""
        if not await super().reap(linger_s):
            return False
        self.exit_code = await self._nursery.status(self._number)
        return True


@dataclass
class _Source:
    """The nursery of this process, from its fork on."""

    pid: int
    control: socket.socket
    surroundings: Mapping[str, str]
    nursery: Nursery | None = None
    """Once an event loop has asked for a worker."""


_sources: list[_Source] = []
_numbers = itertools.count(1)


def prepare() -> None:
    """Fork the nursery from this process, whose imports it shares.

    For a process that has one thread and is about to make a service; elsewhere every worker is spawned. Whoever calls
    it calls `discard_prepared` in the end.
    """
    if threading.active_count() > 1 or not hasattr(os, "fork"):
        return
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):  # A kernel or sandbox in which the end of a child's child is not to be heard of.
        return
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    _sources.append(_Source(forked(theirs, worker_main.nursery), ours, dict(os.environ)))
    theirs.close()


def discard_prepared() -> None:
    """End the nursery, if there is one, once no event loop runs."""
    while _sources:
        source = _sources.pop()
        source.control.close()
        reap(source.pid)


async def spawn(name: str, *, forks: bool) -> ChildProcess:
    """A process; `forks`: it may go on with the nursery's libraries, where there is one. Raises OSError."""
    if _sources:
        try:
            return await _fork(_sources[-1], fresh=not forks)
        except (OSError, asyncio.TimeoutError) as error:
            log.warning("%s: no process could be forked (%s); one is spawned", name, error or "it took too long")
    return SpawnedProcess(name)


async def _fork(source: _Source, *, fresh: bool) -> ForkedProcess:
    """Raises OSError, asyncio.TimeoutError."""
    if source.nursery is None:
        source.nursery = Nursery(source.pid, source.control, lambda: log.error(_ENDED))
    nursery = source.nursery
    await asyncio.wait_for(asyncio.shield(nursery.ready), _IMPORT_TIMEOUT_S)
    number = next(_numbers)
    ours, theirs = socket_pair()
    try:
        # Should it fork one later, that finds the socket closed, and ends.
        pid = await asyncio.wait_for(nursery.fork(number, theirs.fileno(), fresh=fresh), _FORK_TIMEOUT_S)
        return ForkedProcess(ours, pid, number, source, nursery)
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()


_ENDED = "the process that workers are forked from has ended; from now on they are spawned"
