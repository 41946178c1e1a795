"""The process around a worker: signals, environment, the arena.

It settles what must be before any library is loaded: before that it must not import torch, models or backends.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
import multiprocessing
import os
import pkgutil
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NoReturn

import msgspec

from anychip_base.interpreter import python_command
from app import logs
from app.processes.arena import Arena, Pool
from app.processes.channel import Channel, ChannelError, reader, to_packet
from app.processes.forking import die_with, fork_on_request, name_process, settle
from app.processes.packing import read_packed

if TYPE_CHECKING:
    from app.worker.messages import WorkerPlan

_FLUSH_S = 5.0

log = logging.getLogger("anychip.worker")


class Begin(msgspec.Struct, frozen=True, array_like=True):
    """First message to a process, read before it loads any library.

    `path`: its path for modules, as the server has it now. `bare`: it is to have no other environment, nor anything
    else of the server's, as it runs a file that is a program. `program`: "module:function" that this process runs with
    its channel instead of a worker.
    """

    name: str
    environment: dict[bytes, bytes]  # A variable need not be UTF-8.
    log_style: logs.Style
    path: list[str]
    pools: tuple[Pool, ...] = ()
    bare: bool = False
    program: str = ""


read_begin = reader(Begin)


def in_bytes(environment: Mapping[str, str]) -> dict[bytes, bytes]:
    """Return an environment as Begin has it."""
    return {os.fsencode(name): os.fsencode(text) for name, text in environment.items()}


def fork_server(control: socket.socket, server: int, name: str = "fork-workers") -> None:
    """Run the process from which workers are forked, called `name`. Workers of devices without a driver share the
    libraries that every worker imports; in the others a fresh interpreter replaces it.
    """
    settle(server, name)
    import_libraries()
    gc.freeze()  # A collection in a child would touch, and so copy, all shared pages.
    fork_on_request(control, server, _forked, _fresh)


def bare_fork_server(control: socket.socket, server: int) -> None:
    """Run the process from which confined workers are forked: an interpreter that never had anything of the server's.

    It has no other thread, so that a worker has none before it is confined.
    """
    _only_write_to_terminals()
    _import("models.exports.layouts")  # Who opens a file needs it, and who runs its network.
    fork_server(control, server, "fork-confined")


def _forked(server: int, descriptors: Sequence[int]) -> None:
    [descriptor] = descriptors
    main(socket.socket(fileno=descriptor))


_FRESH = "import sys; from app.worker import main; main.fresh(int(sys.argv[1]))"
_BARE = "import sys; from app.worker import main; main.bare(*map(int, sys.argv[1:]))"


def _fresh(server: int, descriptors: Sequence[int]) -> None:
    [descriptor] = descriptors
    os.set_inheritable(descriptor, True)
    command = fresh_command(descriptor)
    os.execv(command[0], command)


def fresh_command(descriptor: int) -> list[str]:
    """Return the command that runs a worker in its own interpreter, which inherits its end of the server's socket."""
    return python_command("-c", _FRESH, str(descriptor))


def fresh(descriptor: int) -> None:
    """Run the process in an interpreter of its own. `descriptor`: its end of the socket to the server."""
    os.set_inheritable(descriptor, False)
    main(socket.socket(fileno=descriptor))


def main(end: socket.socket) -> None:
    """Run the process; it ends when told to, or when the server's end is gone, however the server ended."""
    name_process("anychip-worker")
    # Ctrl-C and a service stop reach the whole process group; the server drains and then tells its workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # As in the server: `systemctl kill` sends it to all of them.
    die_with(os.getppid())  # Even inside a driver call that hangs.
    channel = Channel(end)
    try:
        messages = channel.receive()
        while not messages:
            channel.wait(None)
            messages = channel.receive()
    except (EOFError, ConnectionError):
        return
    [begin] = read_begin(messages[0])
    descriptors = [] if begin.program else [channel.take_descriptor() for _ in range(2)]
    if begin.bare:  # Later messages of a program wait until it sends one.
        _become_bare(begin, end, descriptors)
    _run(begin, channel, messages[1:], descriptors)


def _become_bare(begin: Begin, end: socket.socket, descriptors: Sequence[int]) -> NoReturn:
    """Replace this process by a fresh interpreter without the server's memory and environment, and with only the
    descriptors that it needs. It can write to a terminal, and not read from it.
    """
    written = os.memfd_create("anychip-begin", 0)
    os.write(written, to_packet((begin,)))
    os.lseek(written, 0, os.SEEK_SET)
    kept = (end.fileno(), written, *descriptors)
    for each in kept:
        os.set_inheritable(each, True)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    _only_write_to_terminals()
    sys.path[:] = begin.path
    command = python_command("-c", _BARE, *map(str, kept))
    os.execve(command[0], command, begin.environment)


def _only_write_to_terminals() -> None:
    """Reopen terminals behind the standard streams for writing only: a writer could otherwise read what is typed."""
    for each in (1, 2):
        if os.isatty(each):
            terminal = os.open(f"/proc/self/fd/{each}", os.O_WRONLY | os.O_NOCTTY)
            os.dup2(terminal, each)
            os.close(terminal)


def bare(end: int, begin: int, *descriptors: int) -> None:
    """Run the process in an interpreter that has nothing of the server's but these descriptors."""
    name_process("anychip-worker")
    with open(begin, "rb") as file:
        [message] = read_begin(file.read())
    for each in (end, *descriptors):
        os.set_inheritable(each, False)
    _run(message, Channel(socket.socket(fileno=end)), [], descriptors)


def _run(begin: Begin, channel: Channel, messages: list[bytes], descriptors: Sequence[int]) -> None:
    """Run the program of the first message, else a worker; `messages`: later ones that have come already."""
    os.environb.update(begin.environment)
    sys.path[:] = begin.path
    multiprocessing.current_process().name = begin.name  # Its log lines say so.
    logs.configure(*begin.log_style)
    if begin.program:
        pkgutil.resolve_name(begin.program)(channel, messages)
        return
    memory, load = descriptors
    arena = Arena.opened(begin.pools, memory)
    import_libraries()
    run(channel, arena, read_packed(load))


def import_libraries() -> None:
    """Import all that every worker needs, with garbage collection off: it is a fifth quicker."""
    _import("app.worker.loop")


def _import(module: str) -> None:
    gc.disable()
    with contextlib.suppress(Exception):  # The worker meets the error again and reports it.
        importlib.import_module(module)
    gc.enable()


def run(channel: Channel, arena: Arena, load: WorkerPlan) -> None:
    """Load the models, then serve until Stop or until the other end is gone."""
    from app.worker.load import LoadedDevice
    from app.worker.loop import Worker
    from app.worker.memory import MemoryWatch
    from app.worker.messages import Ended, ServerLink

    link = ServerLink(channel)
    with contextlib.closing(channel), contextlib.closing(arena):
        try:
            try:
                loaded = LoadedDevice(load, link.send)
                memory = MemoryWatch(loaded.backend, loaded.device, load.guard)
            except Exception as error:  # The server gets any error of a driver in one sentence.
                log.debug("the worker cannot start", exc_info=True)
                link.send(Ended(f"{error}" or type(error).__name__))
                link.flush(_FLUSH_S)
                return
            gc.collect()
            gc.freeze()  # What is loaded stays; collections between batches are short.
            with contextlib.closing(loaded), link:
                Worker(loaded, memory, arena, link).serve()
                link.flush(_FLUSH_S)
        except (EOFError, ConnectionError):
            log.info("the server is gone; the worker ends")
        except ChannelError as error:
            log.error("the worker ends: %s", error)
