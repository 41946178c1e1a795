"""The processes that decode, from inside.

    server ─► nursery: imports the libraries once ─► fork ─► decoder: jobs in, pixels into the arena, answers out
                 ▲                                              │
                 └──── its number, later how it ended ◄─────────┘

Owns: the nursery's and the decoders' main loops. Must not import a device's package or touch a device. The nursery has
one thread and never sees a client's byte, so that a decoder forked from it is ready within milliseconds and shares its
memory. A decoder holds no descriptor but its socket, its inbox and the arena, can open nothing else
(models.confinement), and ends when the server's end closes.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import os
import select
import signal
import socket
import sys
import time
from array import array
from typing import TYPE_CHECKING

from app import logs
from app.decoders.messages import ENDED, FORKED, READY, DecodePlan, Event, number_in, pack_event
from app.workers.plain import unpacked

if TYPE_CHECKING:
    from app.decoders.inbox import Inbox
    from app.workers.arena import Arena

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_LONGEST_PACKET_S = 0.004  # Of work before answers are sent, though more jobs of the packet wait.

log = logging.getLogger("anychip.decoders")


def main(control_descriptor: int, parent: int) -> None:
    """The nursery: forks a decoder for each number it is sent, until the server's end closes.

    The first packet brings the descriptors of the plan and of the arena. `parent`: the server's process id.
    """
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(each, signal.SIG_IGN)  # The server hears them and ends us in order.
    _die_with(parent)
    control = socket.socket(fileno=control_descriptor)
    import_libraries()
    packet, descriptors = _received(control)
    if not packet:
        return
    plan_descriptor, arena_descriptor = descriptors
    with open(plan_descriptor, "rb") as file:
        plan: DecodePlan = unpacked(file.read(), ())
    logs.configure(*plan.log_style)
    warm_up(plan)
    gc.freeze()  # A collection in a child would touch, and so copy, all that is shared.
    wake, woken = socket.socketpair()
    for end in (wake, woken):
        end.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(woken.fileno(), warn_on_full_buffer=False)
    control.send(pack_event(Event(READY, 0, 0)))
    children: dict[int, int] = {}  # The number of each decoder by its process.
    poll = select.poll()
    poll.register(control, select.POLLIN)
    poll.register(wake, select.POLLIN)
    while True:
        for descriptor, _ in poll.poll():
            if descriptor == control.fileno():
                packet, descriptors = _received(control)
                if not packet:
                    return
                number, here = number_in(packet), os.getpid()
                pid = os.fork()
                if pid == 0:
                    signal.set_wakeup_fd(-1)
                    for end in (control, wake, woken):
                        end.close()
                    _decoder(plan, here, arena_descriptor, *descriptors)
                for theirs in descriptors:
                    os.close(theirs)
                children[pid] = number
                control.send(pack_event(Event(FORKED, number, pid)))
            else:
                with contextlib.suppress(BlockingIOError):
                    wake.recv(4096)
                _reap(control, children)


def forked(control: socket.socket) -> int:
    """Fork a nursery from this process, which has one thread and has imported what decoders need; its process id."""
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        signal.set_wakeup_fd(-1)
        kept = {0, 1, 2, control.fileno()}
        for descriptor in {int(name) for name in os.listdir("/proc/self/fd")} - kept:
            with contextlib.suppress(OSError):  # The one that listed them is closed already.
                os.close(descriptor)
        main(control.detach(), parent)
        status = 0
    except ConnectionError:
        status = 0  # The server is gone.
    except BaseException:
        log.exception("the process that forks decoders ends")
    finally:
        os._exit(status)


def _received(control: socket.socket) -> tuple[bytes, list[int]]:
    """A packet and the descriptors that came with it."""
    descriptors = array("i")
    data, ancillary, _, _ = control.recvmsg(64, socket.CMSG_SPACE(2 * descriptors.itemsize))
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
                control.send(pack_event(Event(ENDED, number, os.waitstatus_to_exitcode(status))))


def _die_with(parent: int) -> None:
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def warm_up(plan: DecodePlan) -> None:
    """Decode an image of each format for each model: what libraries load when they are first used is there then.

    A decoder can open no file, so it could not load it itself.
    """
    import torch

    from app.decoders.decoder import decode_into
    from app.images.decoding import sample_images
    from app.images.header import read_header

    for model in filter(None, plan.models):
        target = torch.empty(model.input_shape, dtype=torch.uint8)
        for encoded in sample_images():
            decode_into(model, encoded, read_header(encoded), target)


def import_libraries() -> None:
    """Everything that decoders need, set for processes that fork and do one thing at a time."""
    import cv2
    import torch

    from app.decoders import decoder  # noqa: F401

    torch.set_num_threads(1)  # Decoders are the parallelism; and a thread would not survive the fork.
    cv2.setNumThreads(0)
    from app.images import jpeg

    jpeg.library()  # Found out once, for all decoders.


def _keep_stderr_for_logs(plan: DecodePlan) -> None:
    """libjpeg and others write a line to stderr for each strange image, in no form and with no request: dropped."""
    sys.stderr = os.fdopen(os.dup(2), "w", buffering=1, encoding="utf-8", errors="backslashreplace")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    os.close(nowhere)
    logs.configure(*plan.log_style)


def _decoder(
    plan: DecodePlan, parent: int, arena_descriptor: int, connection_descriptor: int, inbox_descriptor: int
) -> None:
    """The process of one decoder; never returns."""
    status = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        _die_with(parent)
        from app.decoders.inbox import Inbox
        from app.workers.arena import Arena
        from models.confinement import confine_decoder

        connection = socket.socket(fileno=connection_descriptor)
        arena = Arena.opened(plan.pools, arena_descriptor)
        inbox = Inbox(plan.lanes, plan.lane_bytes, inbox_descriptor)
        _keep_stderr_for_logs(plan)
        # From here on it reads what strangers have sent, and needs nothing that it does not have.
        confine_decoder(plan.memory_bytes)
        decode_forever(plan, connection, inbox, arena)
        status = 0
    except (EOFError, ConnectionError):
        status = 0  # The server is gone.
    except BaseException:
        log.exception("a decoder ends")
    finally:
        sys.stderr.flush()
        os._exit(status)


def decode_forever(plan: DecodePlan, connection: socket.socket, inbox: Inbox, arena: Arena) -> None:
    """Answer jobs until the other end is gone. Raises ConnectionError."""
    from app.decoders.decoder import Decoder
    from app.decoders.messages import PACKET_BYTES, jobs_in, pack_answer

    decoder = Decoder(plan, inbox, arena)
    while packet := connection.recv(PACKET_BYTES):
        answers = []
        began_s = time.monotonic()
        for job in jobs_in(packet):
            answers.append(pack_answer(decoder.answer(job)))
            if time.monotonic() - began_s > _LONGEST_PACKET_S:
                connection.send(b"".join(answers))
                answers.clear()
        if answers:
            connection.send(b"".join(answers))


if __name__ == "__main__":
    with contextlib.suppress(ConnectionError):  # The server is gone.
        main(int(sys.argv[1]), os.getppid())
