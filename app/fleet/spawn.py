"""Processes of workers: forked from one that has imported what they need, or in a fresh interpreter; reaped.

Owns: the start of a process and its end, as the operating system sees them. Must not know what is said on its channel.
What touches no driver (`late_environment` in backends.vendors.table) is forked and goes on: a worker of the CPU is
there a second or two sooner, and shares the memory of its libraries with the others. What touches one is forked and
replaced by a fresh interpreter. Where there is a fork server, the server itself starts none: until a new program runs,
whoever starts it waits with the interpreter's lock, and on a busy machine that has taken seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import multiprocessing
import multiprocessing.process
import os
import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping

from app.processes.channel import socket_pair
from app.processes.fork_server import Begun, Child, ForkServer, reap, spawned
from app.processes.forking import forked
from app.worker import main as worker_main

log = logging.getLogger("anychip.workers")

KILL_TIMEOUT_S = 10.0
"""A process that has been killed and is still there after so long is inside a driver call that cannot be ended."""


class ChildProcess(ABC):
    """A process that waits for its first message, and our end of the socket pair to it."""

    def __init__(self, end: socket.socket, pid: int, surroundings: Mapping[str, str]) -> None:
        """`surroundings`: the environment it was started in."""
        self.socket = end
        self.pid = pid
        self._surroundings = surroundings

    def environment(self, wanted: Mapping[str, str]) -> dict[str, str]:
        """What the process has to be told: what is wanted, and what has been set here since it was started."""
        return {**dict(os.environ.items() - self._surroundings.items()), **wanted}

    @property
    @abstractmethod
    def exited(self) -> asyncio.Future[int | None]:
        """Its exit status, minus the signal that ended it, once it is reaped; None where that is not known. To be asked
        for in a running event loop.
        """

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
    """A fresh interpreter, which this process itself starts, as there is no fork server."""

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
        self._exited: asyncio.Future[int | None] | None = None
        self._pidfd = -1

    @property
    def exited(self) -> asyncio.Future[int | None]:
        """As ChildProcess.exited."""
        if self._exited is None:
            loop = asyncio.get_running_loop()
            self._exited = loop.create_future()
            self._pidfd = self._watched()
            loop.add_reader(self._pidfd, self._gone)
        return self._exited

    def _watched(self) -> int:
        """A descriptor of ours that can be read once the process is gone."""
        # Not the end of the socket: a process that a worker has started may still hold that, and uvloop hears late
        # of one that ends with unread messages. multiprocessing's sentinel is a pipe, and has the same faults.
        try:
            return os.pidfd_open(self.pid)
        except OSError:  # A kernel or sandbox that has none.
            return os.dup(self._process.sentinel)

    def _gone(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._process.join()
        if self._exited is not None and not self._exited.done():
            self._exited.set_result(self._process.exitcode)

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
    """A child that the fork server has forked."""

    def __init__(self, end: socket.socket, child: Child, surroundings: Mapping[str, str]) -> None:
        super().__init__(end, child.pid, surroundings)
        self._child = child

    @property
    def exited(self) -> asyncio.Future[int | None]:
        """As ChildProcess.exited."""
        return self._child.exited

    def kill(self) -> None:
        """End the process now, if the system can."""
        self._child.kill()


class _Source:
    """Where this process's workers are forked from."""

    def __init__(self, process: int, control: socket.socket) -> None:
        """`process`, `control`: of the first fork server, before an event loop has it."""
        self._begun: Begun | None = (process, control)
        self._fork_server: ForkServer | None = None
        self._surroundings: Mapping[str, str] = dict(os.environ)

    async def fork(self, *, fresh: bool) -> ForkedProcess:
        """Raises OSError."""
        if self._fork_server is None:
            self._fork_server = ForkServer(self._begin)
        ours, theirs = socket_pair()
        try:
            # Should it fork one later, that finds the socket closed, and ends.
            child = await self._fork_server.fork(theirs.fileno(), fresh=fresh)
            return ForkedProcess(ours, child, self._surroundings)
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()

    def _begin(self) -> Begun:
        """The process that was forked from this one, and later fresh ones. Raises OSError."""
        begun, self._begun = self._begun, None
        if begun is None:
            self._surroundings = dict(os.environ)
            begun = spawned("app.worker.main:fork_server")
        return begun

    async def stop(self) -> None:
        """End the fork server that an event loop has."""
        if self._fork_server is not None:
            await self._fork_server.stop()

    def discard(self) -> None:
        """End the one that none has had."""
        if self._begun is not None:
            process, control = self._begun
            control.close()
            reap(process)


_sources: list[_Source] = []


def prepare() -> None:
    """Fork the fork server from this process, whose imports it shares.

    For a process that has one thread and is about to make a service; elsewhere every worker is spawned. Whoever calls
    it calls `stop_forking` in the event loop, and `discard_prepared` in the end.
    """
    if threading.active_count() > 1 or not hasattr(os, "fork"):
        return
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    _sources.append(_Source(forked(theirs, worker_main.fork_server), ours))
    theirs.close()


async def stop_forking() -> None:
    """End the fork server, if there is one: no worker is wanted any more. Idempotent."""
    while _sources:
        source = _sources.pop()
        await source.stop()
        source.discard()


def discard_prepared() -> None:
    """End the fork server that no event loop has had, if there is one."""
    while _sources:
        _sources.pop().discard()


async def spawn(name: str, *, forks: bool) -> ChildProcess:
    """A process; `forks`: it may go on with the fork server's libraries, where there is one. Raises OSError."""
    if _sources:
        try:
            return await _sources[-1].fork(fresh=not forks)
        except OSError as error:
            log.warning("%s: no process could be forked (%s); one is spawned", name, error)
    return SpawnedProcess(name)
