"""A nursery as the event loop sees it: the process from which others are forked.

Owns: its process and socket, and who waits for a child. Must not know what a child does. Nothing here blocks: a nursery
is asked for few children, and says little.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable
from typing import Any

from app.workers.forking import ENDED, FORKED, READY, event_in, pack_request

_STOP_TIMEOUT_S = 5.0
_STATUS_TIMEOUT_S = 2.0
"""How long a nursery may take to say how a child ended that is gone."""


class Nursery:
    """It lives as long as the service; what follows on its death is for its owner to say."""

    def __init__(self, process: int, control: socket.socket, ended: Callable[[], None]) -> None:
        """`process`: its id. `control`: our end of its socket. `ended`: called once when that closes."""
        self._ended = ended
        self._forks: dict[int, asyncio.Future[int]] = {}
        self._statuses: dict[int, asyncio.Future[int]] = {}
        self._loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[None] = self._loop.create_future()
        self._process, self._control = process, control
        self._control.setblocking(False)
        self._loop.add_reader(self._control.fileno(), self._readable)

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process

    @property
    def alive(self) -> bool:
        """Whether its socket is open."""
        return self._control.fileno() >= 0

    def fork(self, number: int, *descriptors: int, fresh: bool = False) -> asyncio.Future[int]:
        """Ask for a child, which gets these descriptors; the future has its process id.

        `fresh`: its interpreter is to be a new one. Raises OSError when the nursery is gone.
        """
        forked = self._forks[number] = self._loop.create_future()
        self._statuses[number] = self._loop.create_future()
        socket.send_fds(self._control, [pack_request(number, fresh=fresh)], descriptors)
        return forked

    async def status(self, number: int) -> int | None:
        """How the child ended: its exit status, minus the signal that ended it; None when that is not to be had."""
        if number not in self._statuses:
            return None
        try:
            return await asyncio.wait_for(self._statuses[number], _STATUS_TIMEOUT_S)
        except (asyncio.TimeoutError, ConnectionError):
            return None
        finally:
            del self._statuses[number]

    def kill(self) -> None:
        """End it now, whatever it does; its children end with it."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process, signal.SIGKILL)

    async def stop(self) -> None:
        """End it, and every child with it. Idempotent."""
        self._close()
        await asyncio.to_thread(reap, self._process)

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
        gone = ConnectionError("the process that forks has ended")
        waited_for: list[asyncio.Future[Any]] = [self.ready, *self._forks.values(), *self._statuses.values()]
        for future in waited_for:
            if not future.done():
                future.set_exception(gone)
                future.exception()  # Whoever waits hears it; nobody need wait.
        self._ended()


def reap(pid: int) -> None:
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
