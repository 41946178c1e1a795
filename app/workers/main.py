"""The process around a worker: signals, environment, the arena.

Owns: what must be settled before any library is loaded. Must not import torch, models or backends before that.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import multiprocessing
import multiprocessing.spawn
import os
import signal
import socket
import sys
from collections.abc import Sequence

from app import logs
from app.workers.arena import Arena
from app.workers.channel import Channel
from app.workers.forking import die_with, fork_on_request, name_process, settle
from app.workers.load_file import read_load
from app.workers.messages import Begin, from_server
from app.workers.worker import run


def nursery(control: socket.socket, server: int) -> None:
    """The process from which workers come. Those of devices without a driver share all that every worker imports; in
    the others it is replaced by a fresh interpreter.
    """
    settle(server, "worker-nursery")
    _import_libraries()
    gc.freeze()  # A collection in a child would touch, and so copy, all that is shared.
    fork_on_request(control, server, _forked, _fresh)


def _forked(server: int, descriptors: Sequence[int]) -> None:
    [descriptor] = descriptors
    main(socket.socket(fileno=descriptor))


# Nothing is imported before the path is set: the current folder, which comes first with -c, may hold anything.
_FRESH = "import sys; sys.path[:] = sys.argv[2:]; from app.workers.main import fresh; fresh(int(sys.argv[1]))"


def _fresh(server: int, descriptors: Sequence[int]) -> None:
    [descriptor] = descriptors
    os.set_inheritable(descriptor, True)
    command = multiprocessing.spawn.get_command_line()  # With the options of this interpreter.
    options = command[: command.index("-c")]
    os.execv(options[0], [*options, "-c", _FRESH, str(descriptor), *sys.path])


def fresh(descriptor: int) -> None:
    """The process, in an interpreter of its own. `descriptor`: its end of the socket to the server."""
    os.set_inheritable(descriptor, False)
    main(socket.socket(fileno=descriptor))


def main(end: socket.socket) -> None:
    """The process: ends when told to, or when the server's end is gone, however the server ended."""
    name_process("anychip-worker")
    # Ctrl-C and a service stop reach the whole process group; the server drains and then tells its workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # The server hears it and sends Release.
    die_with(os.getppid())  # Even inside a driver call that hangs.
    channel = Channel(end)
    try:
        messages = channel.receive()
        while not messages:
            channel.wait(None)
            messages = channel.receive()
    except (EOFError, ConnectionError):
        return
    begin = from_server(messages[0])
    assert isinstance(begin, Begin)
    arena = Arena.opened(begin.pools, channel.take_descriptor())
    os.environ.update(begin.environment)
    sys.path[:] = begin.path
    multiprocessing.current_process().name = begin.name  # Its log lines say so.
    logs.configure(*begin.log_style)
    _import_libraries()
    run(channel, arena, read_load(channel.take_descriptor()))


def _import_libraries() -> None:
    """All that every worker needs, a fifth quicker for not looking for garbage meanwhile."""
    gc.disable()
    with contextlib.suppress(Exception):  # The worker will meet it again, and say so.
        importlib.import_module("app.precision.gate")
    gc.enable()
