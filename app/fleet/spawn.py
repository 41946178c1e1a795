"""Processes of workers: forked from one that has imported their libraries, or in a fresh interpreter.

Owns: the start of a process and its first message. Must not know what else is said, nor how it ends
(app.processes.place). A worker that touches no driver (`forks` in backends.vendors.table) is forked and goes on: a
worker of the CPU is there a second or two sooner, and shares the memory of its libraries with the others. One that
touches a driver is forked and replaced by a fresh interpreter. One that runs a foreign file is forked from a process
that never had the server's data.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from anychip_base.interpreter import bare_environment
from app.prepared import CONFINED, WORKERS
from app.processes.channel import Channel, NotReadError, socket_pair
from app.processes.fork_server import ForkServer, begin, discard_prepared, is_prepared, start
from app.processes.packing import write_packed
from app.processes.place import Cause, Child, SupervisedChild
from app.processes.talk import Talk
from app.worker import main as worker_main
from app.worker.begin import Begin, to_process

log = logging.getLogger("anychip.workers")

_fork_servers: dict[str, ForkServer] = {}


class Spawned(NamedTuple):
    """A process that waits for its first message, our end of its socket, and the environment it was started in.

    `bare`: the process has nothing of the server's.
    """

    child: Child
    socket: socket.socket
    environment: Mapping[str, str]
    bare: bool = False


async def spawn(name: str, *, forks: bool, bare: bool = False) -> Spawned:
    """Start a process. Raises OSError.

    `forks`: it may go on with a fork server's libraries, if there is one. `bare`: it is to have nothing of the
    server's; if it could not be started so, `Spawned.bare` is False, and its first message must have it start afresh.
    """
    bare = bare and forks
    main = CONFINED if bare else WORKERS
    if main not in _fork_servers and (bare or is_prepared(main)):
        _fork_servers[main] = ForkServer(partial(begin, main, bare_environment() if bare else None))
    ours, theirs = socket_pair()
    try:
        if main in _fork_servers:
            fork_server = _fork_servers[main]
            try:
                # A process forked later finds its socket closed, and ends.
                child = await fork_server.fork(theirs.fileno(), fresh=not forks)
                return Spawned(child, ours, fork_server.environment, bare)
            except OSError as error:
                log.warning("%s: no process could be forked (%s); one is spawned", name, error)
        environment = dict(os.environ)
        pid = start(worker_main.fresh_command(theirs.fileno()), environment, theirs)
        return Spawned(Child(pid), ours, environment)
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()  # Ours would keep the socket open after the process's death.


async def spawn_with(content: object, kind: str, name: str, *, forks: bool, bare: bool = False) -> tuple[Spawned, int]:
    """Start a process for which `content` is packed; return also the memory with it, a descriptor of the caller's.

    `kind`: name of that memory. Raises TypeError for what is more than data, OSError.
    """
    packing = asyncio.ensure_future(asyncio.to_thread(write_packed, content, kind))
    try:
        descriptor = await asyncio.shield(packing)
    except asyncio.CancelledError:
        with contextlib.suppress(OSError, TypeError):
            os.close(await packing)
        raise
    try:
        return await spawn(name, forks=forks, bare=bare), descriptor
    except BaseException:
        os.close(descriptor)
        raise


class SpawnedChild(SupervisedChild):
    """A child that talks once it has had its first message."""

    talk: Talk

    def connect(
        self,
        spawned: Spawned,
        begin: Begin,
        descriptors: Sequence[int],
        heard: Any,
        handle: Callable[[Any], None],
        **limits: Any,
    ) -> None:
        """Send the first message with `descriptors`, which are closed here, and begin to talk: as Talk says."""
        self.process = spawned.child
        channel = Channel(spawned.socket)
        self.talk = Talk(channel, heard, handle, name=self.name, **limits)
        self.talk.ended.add_done_callback(self._talk_ended)
        with contextlib.suppress(OSError):  # It has ended already, which is heard next.
            channel.send(to_process(begin), descriptors)

    def disconnect(self) -> None:
        """Close the channel. Idempotent."""
        if self.process is not None:
            self.talk.end(self.over.result())

    def _talk_ended(self, ended: asyncio.Future[str]) -> None:
        if self.talk.error is None:
            self.end(ended.result())
        else:  # A child that breaks the rules cannot be trusted.
            hung = isinstance(self.talk.error, NotReadError)
            self.kill(ended.result(), Cause.HUNG if hung else Cause.DIED)


async def stop_forking() -> None:
    """End all fork servers: no worker is wanted any more. Idempotent."""
    for main in (WORKERS, CONFINED):
        discard_prepared(main)
    while _fork_servers:
        await _fork_servers.popitem()[1].stop()
