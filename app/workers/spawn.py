"""Processes of workers: spawned, taken prepared, reaped.

Owns: the start of a process and its end, as the operating system sees them. Must not know what is said on its channel.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import multiprocessing
import multiprocessing.process
import os
from collections.abc import Mapping

from app.workers import main as worker_main
from app.workers.channel import socket_pair

log = logging.getLogger("anychip.workers")

KILL_TIMEOUT_S = 10.0
"""A process that has been killed and is still there after so long is inside a driver call that cannot be ended."""


class SpawnedProcess:
    """A process that waits for its first message, and our end of the socket pair to it."""

    def __init__(self, name: str, prepare: bool = False) -> None:
        """`prepare`: it imports what every worker needs before the first message comes. Raises OSError."""
        context = multiprocessing.get_context("spawn")
        self.socket, theirs = socket_pair()
        self._surroundings = dict(os.environ)
        # Should the server end in disorder, multiprocessing's own exit hook kills a daemon, too.
        self.process = context.Process(target=worker_main.main, args=(theirs, prepare), name=name, daemon=True)
        try:
            self.process.start()
        except BaseException:
            self.socket.close()
            raise
        finally:
            theirs.close()  # Ours would keep the socket open after the process's death.
        self._exited: asyncio.Future[None] | None = None
        self._pidfd = -1

    @property
    def pid(self) -> int:
        """The process's id."""
        return self.process.pid or 0

    def environment(self, wanted: Mapping[str, str]) -> dict[str, str]:
        """What the process has to be told: what is wanted, and what has been set here since it was started."""
        return {**dict(os.environ.items() - self._surroundings.items()), **wanted}

    @property
    def exited(self) -> asyncio.Future[None]:
        """Done once the process is gone; to be asked for in a running event loop."""
        if self._exited is None:
            loop = asyncio.get_running_loop()
            self._exited = loop.create_future()
            # Not the end of the socket: a process that a worker has started may still hold that, and uvloop hears late
            # of one that ends with unread messages. multiprocessing's sentinel is a pipe, and has the same faults.
            try:
                self._pidfd = os.pidfd_open(self.pid)
            except OSError:  # A kernel or sandbox that has none.
                self._pidfd = os.dup(self.process.sentinel)
            loop.add_reader(self._pidfd, self._gone)
        return self._exited

    def _gone(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        self.process.join()
        if self._exited is not None and not self._exited.done():
            self._exited.set_result(None)

    def kill(self) -> None:
        """End the process now, if the system can."""
        with contextlib.suppress(OSError):
            self.process.kill()

    async def reap(self, linger_s: float) -> bool:
        """Wait for the end; kill what lingers. False: the process cannot be killed, and is left behind."""
        if await self._ends_within(linger_s):
            return True
        self.kill()
        if await self._ends_within(KILL_TIMEOUT_S):
            return True
        # multiprocessing would wait for it when this process ends, for ever.
        getattr(multiprocessing.process, "_children", set()).discard(self.process)
        return False

    async def _ends_within(self, limit_s: float) -> bool:
        await asyncio.wait((self.exited,), timeout=limit_s)
        return self.exited.done()

    def discard(self) -> None:
        """End a process that nobody has taken."""
        self.socket.close()
        self.process.kill()
        self.process.join()


_prepared: list[SpawnedProcess] = []


def prepare() -> None:
    """Start a process for the first worker: while this one imports torch and what else it needs, that one does too.

    Whoever calls it calls `discard_prepared` in the end.
    """
    _prepared.append(SpawnedProcess("prepared", prepare=True))


def discard_prepared() -> None:
    """End the process that no worker has taken, if there is one."""
    while _prepared:
        _prepared.pop().discard()


def spawn(name: str, *, takes_prepared: bool) -> SpawnedProcess:
    """A process, the prepared one where there is one and it will do. Raises OSError."""
    while takes_prepared and _prepared:
        spawned = _prepared.pop()
        if spawned.process.is_alive():
            return spawned
        spawned.discard()
    return SpawnedProcess(name)
