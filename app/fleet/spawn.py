"""Processes of workers: forked from one that has imported what they need, or in a fresh interpreter.

Owns: the start of a process. Must not know what is said on its channel, nor how it ends (process). What touches no
driver (`late_environment` in backends.vendors.table) is forked and goes on: a worker of the CPU is there a second or
two sooner, and shares the memory of its libraries with the others. What touches one is forked and replaced by a fresh
interpreter.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

from app.processes.channel import socket_pair
from app.processes.fork_server import Child, ForkServer, begin, discard_prepared, is_prepared, start
from app.worker import main as worker_main

log = logging.getLogger("anychip.workers")

FORK_SERVER = "app.worker.main:fork_server"
"""What the fork server of workers runs. Where none was prepared, every worker is spawned."""
_fork_servers: list[ForkServer] = []


class Spawned(NamedTuple):
    """A process that waits for its first message, our end of its socket, and the environment it was started in."""

    child: Child
    socket: socket.socket
    environment: Mapping[str, str]


async def spawn(name: str, *, forks: bool) -> Spawned:
    """A process; `forks`: it may go on with the fork server's libraries, where there is one. Raises OSError."""
    if is_prepared(FORK_SERVER) and not _fork_servers:
        _fork_servers.append(ForkServer(partial(begin, FORK_SERVER)))
    ours, theirs = socket_pair()
    try:
        if _fork_servers:
            fork_server = _fork_servers[-1]
            try:
                # Should it fork one later, that finds the socket closed, and ends.
                child = await fork_server.fork(theirs.fileno(), fresh=not forks)
                return Spawned(child, ours, fork_server.environment)
            except OSError as error:
                log.warning("%s: no process could be forked (%s); one is spawned", name, error)
        environment = dict(os.environ)
        return Spawned(Child(start(worker_main.fresh_command(theirs.fileno()), theirs)), ours, environment)
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()  # Ours would keep the socket open after the process's death.


async def stop_forking() -> None:
    """End the fork server, if there is one: no worker is wanted any more. Idempotent."""
    discard_prepared(FORK_SERVER)
    while _fork_servers:
        await _fork_servers.pop().stop()
