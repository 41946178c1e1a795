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
from typing import NoReturn

from app import logs
from app.processes.arena import Arena
from app.processes.channel import Channel
from app.processes.forking import die_with, fork_on_request, name_process, settle
from app.worker.load_file import read_load
from app.worker.loop import run
from app.worker.messages import Begin, from_server, to_worker


def fork_server(control: socket.socket, server: int) -> None:
    """The process from which workers come. Those of devices without a driver share all that every worker imports; in
    the others it is replaced by a fresh interpreter.
    """
    settle(server, "fork-workers")
    _import_libraries()
    gc.freeze()  # A collection in a child would touch, and so copy, all that is shared.
    fork_on_request(control, server, _forked, _fresh)


def _forked(server: int, descriptors: Sequence[int]) -> None:
    [descriptor] = descriptors
    main(socket.socket(fileno=descriptor))


# Nothing is imported before the path is set: the current folder, which comes first with -c, may hold anything.
_PATH = "import sys; sys.path[:] = sys.argv[2:]; from app.worker import main; "
_FRESH = _PATH + "main.fresh(int(sys.argv[1]))"
_BARE = _PATH + "main.bare(*map(int, sys.argv[1].split(',')))"


def _fresh(server: int, descriptors: Sequence[int]) -> None:
    [descriptor] = descriptors
    os.set_inheritable(descriptor, True)
    command = fresh_command(descriptor)
    os.execv(command[0], command)


def fresh_command(descriptor: int) -> list[str]:
    """What runs a worker in an interpreter of its own, which inherits its end of the socket to the server."""
    return _command(_FRESH, descriptor, path=sys.path)


def _command(program: str, *descriptors: int, path: Sequence[str]) -> list[str]:
    command = multiprocessing.spawn.get_command_line()  # With the options of this interpreter.
    return [*command[: command.index("-c")], "-c", program, ",".join(map(str, descriptors)), *path]


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
    descriptors = [channel.take_descriptor() for _ in range(3)]
    if begin.bare:
        _become_bare(begin, end, descriptors)
    _serve(begin, channel, *descriptors)


def _become_bare(begin: Begin, end: socket.socket, descriptors: Sequence[int]) -> NoReturn:
    """Replace this process by a fresh interpreter: what was the server's goes, memory, environment and descriptors but
    those it needs. It can write to a terminal, and not read from it.
    """
    written = os.memfd_create("anychip-begin", 0)
    os.write(written, to_worker(begin))
    os.lseek(written, 0, os.SEEK_SET)
    kept = (end.fileno(), *descriptors, written)
    for each in kept:
        os.set_inheritable(each, True)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for each in (1, 2):
        if os.isatty(each):
            os.dup2(os.open(f"/proc/self/fd/{each}", os.O_WRONLY | os.O_NOCTTY), each)
    command = _command(_BARE, *kept, path=begin.path)
    os.execve(command[0], command, begin.environment)


def bare(end: int, arena: int, results: int, load: int, begin: int) -> None:
    """The process, in an interpreter that has nothing else of the server's: descriptors."""
    name_process("anychip-worker")
    with open(begin, "rb") as file:
        message = from_server(file.read())
    assert isinstance(message, Begin)
    for each in (end, arena, results, load):
        os.set_inheritable(each, False)
    _serve(message, Channel(socket.socket(fileno=end)), arena, results, load)


def _serve(begin: Begin, channel: Channel, *descriptors: int) -> None:
    *of_arena, load_descriptor = descriptors
    arena = Arena.opened(begin.pools, *of_arena)
    os.environ.update(begin.environment)
    sys.path[:] = begin.path
    multiprocessing.current_process().name = begin.name  # Its log lines say so.
    logs.configure(*begin.log_style)
    _import_libraries()
    run(channel, arena, read_load(load_descriptor))


def _import_libraries() -> None:
    """All that every worker needs, a fifth quicker for not looking for garbage meanwhile."""
    gc.disable()
    with contextlib.suppress(Exception):  # The worker will meet it again, and say so.
        importlib.import_module("app.precision.gate")
    gc.enable()
