"""The inside of a fork server: the messages of it and the server, and the loop that forks (docs/architecture.md).

A fork server has one thread, touches no device and never sees a client's byte, so that a child is there within
milliseconds and shares its memory. It forks twice, as daemons do, and the process in between ends at once: the child is
then the server's, lives on without the fork server, and not without the server.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pkgutil
import signal
import socket
import struct
import sys
import tempfile
import time
import traceback
from array import array
from collections.abc import Callable, Sequence
from typing import NamedTuple, NoReturn, TypeAlias

from app.processes.packing import read_packed

_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15  # linux/prctl.h
_EVENT = struct.Struct("<BIii")
REQUEST = struct.Struct("<I?")  # The child's number, and whether it is a fresh interpreter; descriptors go beside it.
READY, FORKED, NOT_FORKED = 1, 2, 3
_LOOK_S = 0.0002
_MOST_DESCRIPTORS = 253  # SCM_MAX_FD: so many go with one packet.


class Event(NamedTuple):
    """Message of a fork server: READY once its libraries are there, and whenever it is asked for the number 0; FORKED
    with a child's process id; NOT_FORKED with the system's error number. `between`: the process between the two.
    """

    kind: int
    number: int
    value: int
    between: int


def event_in(packet: bytes) -> Event:
    """Decode the event of a packet."""
    return Event._make(_EVENT.unpack(packet))


def end_with(run: Callable[[], None]) -> NoReturn:
    """Run the rest of this process, which was forked; never return. Its parent's exit hooks are not its own."""
    status = 1
    try:
        run()
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(status)


def settle(parent: int, name: str) -> None:
    """Make this process ignore signals, as the server ends its fork servers in order, and die with the server."""
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(each, signal.SIG_IGN)
    name_process(name)
    die_with(parent)


def die_with(parent: int) -> None:
    """End this process when its parent ends."""
    with contextlib.suppress(OSError, AttributeError):  # Linux.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def name_process(name: str) -> None:
    """Set the name of this process in `ps` and `top`: 15 characters."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode())


def run_spawned() -> None:
    """Be the first of some fork servers in a fresh interpreter, and fork the others, which share its libraries.

    sys.argv: the server's process id; the functions that import the libraries; each fork server's main function and
    descriptor. The others are the server's own children, and say FORKED first.
    """
    server, libraries, *named = sys.argv[1:]
    parent = int(server)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    settle(parent, "fork-servers")
    for name in filter(None, libraries.split(",")):
        with contextlib.suppress(Exception):  # Code that needs them meets the error again and reports it.
            pkgutil.resolve_name(name)()
    mains = (each.rpartition("=") for each in named)
    servers = [(main, socket.socket(fileno=int(descriptor))) for main, _, descriptor in mains]
    (first, control), *others = servers

    def become(main: str, own: socket.socket) -> None:
        for _, each in servers:
            each.close()
        if _take_environment(own):
            pkgutil.resolve_name(main)(own, parent)

    with contextlib.suppress(ConnectionError):  # The server is gone.
        for main, theirs in others:
            with theirs.dup() as own:
                _fork(theirs, 0, parent, lambda: become(main, own))  # noqa: B023
            theirs.close()
        pkgutil.resolve_name(first)(control, parent)


def _take_environment(control: socket.socket) -> bool:
    """Take the server's environment, which the first packet brings; return False if the server is gone."""
    packet, descriptors = received(control)
    if not packet:
        return False
    os.environ.clear()
    os.environb.update(read_packed(descriptors[0]))
    tempfile.tempdir = None  # Libraries may have asked for it.
    return True


def is_stopped(pid: int | None) -> bool:
    """Return True if the process is stopped, by SIGSTOP or a debugger, and may go on at any moment; False if there is
    none (any more).
    """
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()  # proc(5): the name is in brackets, the state follows.
    except OSError:
        return False
    return fields[:1] in (["T"], ["t"])


Main: TypeAlias = Callable[[int, Sequence[int]], None]
"""Main function of a forked process, with the server's process id and the descriptors that came with its number."""


def fork_on_request(control: socket.socket, server: int, child: Main, fresh: Main | None = None) -> None:
    """Fork a process for each number that is sent, until the server's end closes.

    `server`: its process id. `child`: main function of a process; `fresh`: of one in a fresh interpreter.
    """
    _say(control, READY)
    while True:
        packet, descriptors = received(control)
        if not packet:
            return
        number, is_fresh = REQUEST.unpack(packet)
        if not number:
            _say(control, READY)
            continue
        main = fresh if is_fresh and fresh is not None else child
        _fork(control, number, server, lambda: main(server, descriptors))  # noqa: B023
        for theirs in descriptors:
            os.close(theirs)


def _fork(control: socket.socket, number: int, server: int, run: Callable[[], None]) -> None:
    try:
        between = os.fork()
    except OSError as error:
        _say(control, NOT_FORKED, number, error.errno or 0)
    else:
        if between == 0:
            end_with(lambda: _fork_again(control, number, server, run))
        os.waitpid(between, 0)


def _fork_again(control: socket.socket, number: int, server: int, run: Callable[[], None]) -> None:
    between = os.getpid()
    try:
        pid = os.fork()
    except OSError as error:
        _say(control, NOT_FORKED, number, error.errno or 0, between)
        return
    if pid:
        return
    while os.getppid() == between:  # The process in between has only to end.
        time.sleep(_LOOK_S)
    die_with(server)
    with contextlib.suppress(ConnectionError):  # The server does not want the child any more; the child finds that out.
        _say(control, FORKED, number, os.getpid(), between)
    control.close()
    run()


def _say(control: socket.socket, kind: int, number: int = 0, value: int = 0, between: int = 0) -> None:
    control.send(_EVENT.pack(kind, number, value, between))


def received(control: socket.socket) -> tuple[bytes, list[int]]:
    """Receive a packet and its descriptors."""
    descriptors = array("i")
    data, ancillary, _, _ = control.recvmsg(64, socket.CMSG_SPACE(_MOST_DESCRIPTORS * descriptors.itemsize))
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(content[: len(content) - len(content) % descriptors.itemsize])
    return data, descriptors.tolist()
