"""The inside of a nursery: a process from which others are forked.

    server ─► nursery: imports the libraries once ─► fork ─► child
                 ▲                                             │
                 └──── its number, later how it ended ◄────────┘

Owns: what the two say to each other, and the loop that forks. Must not know what a child does. A nursery has one
thread, touches no device and never sees a client's byte, so that a child is there within milliseconds and shares its
memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import socket
import struct
import sys
import traceback
from array import array
from collections.abc import Callable, Sequence
from typing import NamedTuple, NoReturn, TypeAlias

_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15  # linux/prctl.h
_EVENT = struct.Struct("<BIi")
_REQUEST = struct.Struct("<I?")
READY, FORKED, ENDED = 1, 2, 3
_MOST_DESCRIPTORS = 253  # SCM_MAX_FD: so many go with one packet.


class Event(NamedTuple):
    """What a nursery says: READY once its libraries are there; FORKED with a child's process id; ENDED with its exit
    status, which is minus the signal that ended it.
    """

    kind: int
    number: int
    value: int


def event_in(packet: bytes) -> Event:
    """The event of a packet."""
    return Event._make(_EVENT.unpack(packet))


def pack_request(number: int, *, fresh: bool) -> bytes:
    """Asks a nursery for a child, or for a `fresh` interpreter; its descriptors go beside it."""
    return _REQUEST.pack(number, fresh)


def forked(control: socket.socket, main: Callable[[socket.socket, int], None]) -> int:
    """Fork a nursery from this process, which has one thread; returns its process id.

    It runs `main` with its socket and the id of this process, and keeps nothing else open but the standard streams.
    """
    parent = os.getpid()
    pid = os.fork()

    def run() -> None:
        signal.set_wakeup_fd(-1)
        kept = {0, 1, 2, control.fileno()}
        for descriptor in {int(name) for name in os.listdir("/proc/self/fd")} - kept:
            with contextlib.suppress(OSError):  # The one that listed them is closed already.
                os.close(descriptor)
        with contextlib.suppress(ConnectionError):  # The server is gone.
            main(control, parent)

    if pid == 0:
        end_with(run)
    return pid


def end_with(run: Callable[[], None]) -> NoReturn:
    """Run the rest of this process, which was forked; never returns. Its parent's exit hooks are not its own."""
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
    """What a nursery does first: the server hears signals, and ends it in order; it dies with the server."""
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(each, signal.SIG_IGN)
    name_process(name)
    die_with(parent)


def die_with(parent: int) -> None:
    """This process ends when its parent does."""
    with contextlib.suppress(OSError, AttributeError):  # Linux.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def name_process(name: str) -> None:
    """What `ps` and `top` call this process: 15 characters."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode())


Child: TypeAlias = Callable[[int, Sequence[int]], None]
"""What a forked process does, with its parent's process id and the descriptors that came with its number."""


def fork_on_request(control: socket.socket, child: Child, fresh: Child | None = None) -> None:
    """Fork a process for each number that is sent, until the server's end closes.

    `child`: what it does; `fresh`: what it does where a fresh interpreter is asked for.
    """
    wake, woken = socket.socketpair()
    for end in (wake, woken):
        end.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(woken.fileno(), warn_on_full_buffer=False)
    control.send(_EVENT.pack(READY, 0, 0))
    children: dict[int, int] = {}  # The number of each child by its process.
    poll = select.poll()
    poll.register(control, select.POLLIN)
    poll.register(wake, select.POLLIN)
    while True:
        for descriptor, _ in poll.poll():
            if descriptor == control.fileno():
                packet, descriptors = received(control)
                if not packet:
                    return
                number, is_fresh = _REQUEST.unpack(packet)
                main = fresh if is_fresh and fresh is not None else child
                here, pid = os.getpid(), os.fork()
                if pid == 0:
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    for each in (control, wake, woken):
                        each.close()
                    end_with(lambda: main(here, descriptors))  # noqa: B023
                for theirs in descriptors:
                    os.close(theirs)
                children[pid] = number
                control.send(_EVENT.pack(FORKED, number, pid))
            else:
                with contextlib.suppress(BlockingIOError):
                    wake.recv(4096)
                _reap(control, children)


def received(control: socket.socket) -> tuple[bytes, list[int]]:
    """A packet and the descriptors that came with it."""
    descriptors = array("i")
    data, ancillary, _, _ = control.recvmsg(64, socket.CMSG_SPACE(_MOST_DESCRIPTORS * descriptors.itemsize))
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(content[: len(content) - len(content) % descriptors.itemsize])
    return data, descriptors.tolist()


def _reap(control: socket.socket, children: dict[int, int]) -> None:
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            number = children.pop(pid, None)
            if number is not None:
                control.send(_EVENT.pack(ENDED, number, os.waitstatus_to_exitcode(status)))
