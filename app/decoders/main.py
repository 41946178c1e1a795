"""The processes that decode, from inside.

Owns: what their nursery loads before it forks them (app/workers/forking.py), and the main loop of a decoder. Must not
import a device's package or touch a device. A decoder holds no descriptor but its socket, its inbox and the arena, can
open nothing else (models.confinement), and ends when the server's end closes.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import socket
import sys
import time
from typing import TYPE_CHECKING

from app import logs
from app.decoders.messages import PACKET_BYTES, DecodePlan, jobs_in, pack_answer
from app.workers.forking import die_with, fork_on_request, name_process, received, settle
from app.workers.plain import unpacked

if TYPE_CHECKING:
    from app.decoders.inbox import Inbox
    from app.workers.arena import Arena

_LONGEST_WORK_S = 0.004  # Before answers are sent, though more jobs of the packet wait.

log = logging.getLogger("anychip.decoders")


def main(control: socket.socket, parent: int) -> None:
    """The nursery. The first packet brings the descriptors of the plan and of the arena. `parent`: the server."""
    settle(parent, "decoder-nursery")
    import_libraries()
    prepare_to_decode()
    packet, descriptors = received(control)
    if not packet:
        return
    plan_descriptor, *arena_descriptors = descriptors
    with open(plan_descriptor, "rb") as file:
        plan: DecodePlan = unpacked(file.read(), ())
    logs.configure(*plan.log_style)
    warm_up(plan)
    gc.freeze()  # A collection in a child would touch, and so copy, all that is shared.
    fork_on_request(control, lambda here, theirs: _decoder(plan, here, arena_descriptors, *theirs))


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
    """Import everything that decoders need. Computes nothing: others may be forked from this process, too."""
    from app.decoders import decoder  # noqa: F401


def prepare_to_decode() -> None:
    """Compute without threads from now on, and find out once, for all decoders, what reads JPEG.

    Decoders are the parallelism, and a thread would not survive a fork.
    """
    import cv2
    import torch

    from app.images import jpeg

    torch.set_num_threads(1)
    cv2.setNumThreads(0)
    jpeg.library()


def _keep_stderr_for_logs(plan: DecodePlan) -> None:
    """libjpeg and others write a line to stderr for each strange image, in no form and with no request: dropped."""
    sys.stderr = os.fdopen(os.dup(2), "w", buffering=1, encoding="utf-8", errors="backslashreplace")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    os.close(nowhere)
    logs.configure(*plan.log_style)


def _decoder(
    plan: DecodePlan, parent: int, arena_descriptors: list[int], connection_descriptor: int, inbox_descriptor: int
) -> None:
    """The process of one decoder."""
    name_process("anychip-decoder")
    die_with(parent)
    import torch

    from app.decoders.inbox import Inbox
    from app.workers.arena import Arena
    from models.confinement import confine_decoder

    connection = socket.socket(fileno=connection_descriptor)
    arena = Arena.opened(plan.pools, *arena_descriptors)
    inbox = Inbox(plan.lanes, plan.lane_bytes, inbox_descriptor)
    _keep_stderr_for_logs(plan)
    # From here on it reads what strangers have sent, and needs nothing that it does not have.
    confine_decoder(plan.memory_bytes)
    try:
        with contextlib.suppress(EOFError, ConnectionError), torch.inference_mode():  # The server is gone.
            decode_forever(plan, connection, inbox, arena)
    except Exception:
        log.exception("a decoder ends")
        raise SystemExit(1) from None


def decode_forever(plan: DecodePlan, connection: socket.socket, inbox: Inbox, arena: Arena) -> None:
    """Answer jobs until the other end is gone. Raises ConnectionError."""
    from app.decoders.decoder import Decoder

    decoder = Decoder(plan, inbox, arena)
    while packet := connection.recv(PACKET_BYTES):
        answers = []
        began_s = time.monotonic()
        for job in jobs_in(packet):
            answers.append(pack_answer(decoder.answer(job)))
            now_s = time.monotonic()
            if now_s - began_s > _LONGEST_WORK_S:
                connection.send(b"".join(answers))
                answers.clear()
                began_s = now_s
        if answers:
            connection.send(b"".join(answers))


if __name__ == "__main__":
    with contextlib.suppress(ConnectionError):  # The server is gone.
        main(socket.socket(fileno=int(sys.argv[1])), os.getppid())
