"""Decoder processes, from inside.

Owns: the imports of their fork server before it forks (app/processes/forking.py), and the main loop of a decoder. Must
not import a device's package or touch a device. A decoder holds no descriptor but its socket, its inbox, the arena and
/dev/null, can open nothing else (models.confinement), and ends when the server's end closes. It does not write to the
streams of the service.
"""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import time

from app import logs
from app.decoder.messages import PACKET_BYTES, Decoded, DecodePlan, Inbox, Job
from app.processes.arena import Arena
from app.processes.channel import close_all, reader, to_packet
from app.processes.forking import fork_on_request, name_process, received, settle
from app.processes.packing import read_packed

_LONGEST_WORK_S = 0.004  # Before answers are sent, though more jobs wait.


def main(control: socket.socket, server: int) -> None:
    """Run the fork server. The first packet brings the descriptors of plan and arena. `server`: its process id."""
    settle(server, "fork-decoders")
    import_libraries()
    prepare_to_decode()
    packet, descriptors = received(control)
    if not packet:
        return
    plan_descriptor, *arena_descriptors = descriptors
    plan: DecodePlan = read_packed(plan_descriptor)
    logs.configure(*plan.log_style)
    warm_up(plan)
    gc.freeze()  # A collection in a child would touch, and so copy, all that is shared.
    fork_on_request(control, server, lambda _, theirs: _decoder(plan, arena_descriptors, *theirs))


def warm_up(plan: DecodePlan) -> None:
    """Decode an image of each format for each model, so that libraries load now what they need at first use.

    A decoder can open no file, so it could not load it itself.
    """
    import torch

    from app.decoder.decoder import decode_into
    from app.images.decoding import sample_images
    from app.images.header import read_header

    for model in filter(None, plan.models):
        target = torch.empty(model.input_shape, dtype=torch.uint8)
        for encoded in sample_images():
            decode_into(model, encoded, read_header(encoded), target)


def import_libraries() -> None:
    """Import everything that decoders need. Computes nothing: others may be forked from this process, too."""
    from app.decoder import decoder  # noqa: F401


def prepare_to_decode() -> None:
    """Compute without threads from now on, and choose the JPEG library once for all decoders.

    Decoders are the parallelism, and a thread would not survive a fork.
    """
    import cv2
    import torch

    from app.images import decoding

    torch.set_num_threads(1)
    cv2.setNumThreads(0)
    decoding.library()


def _leave_streams() -> None:
    """Drop the output of libraries: libjpeg and others write to stderr for strange images, without form or request."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(nowhere, stream)
    os.close(nowhere)


def _decoder(plan: DecodePlan, arena_descriptors: list[int], connection_descriptor: int, inbox_descriptor: int) -> None:
    name_process("anychip-decoder")
    import torch

    from models.confinement import confine_decoder

    # The starter of the service may have left others open.
    kept = {0, 1, 2, *arena_descriptors, connection_descriptor, inbox_descriptor}
    close_all({int(name) for name in os.listdir("/proc/self/fd")} - kept)
    connection = socket.socket(fileno=connection_descriptor)
    arena = Arena.opened(plan.pools, *arena_descriptors, memories=plan.memories)
    inbox = Inbox(plan.buffers, plan.buffer_bytes, inbox_descriptor)
    _leave_streams()
    # From here on it reads what strangers have sent, and needs nothing that it does not have.
    confine_decoder(plan.memory_bytes)
    with contextlib.suppress(EOFError, ConnectionError), torch.inference_mode():  # The server is gone.
        decode_forever(plan, connection, inbox, arena)


def decode_forever(plan: DecodePlan, connection: socket.socket, inbox: Inbox, arena: Arena) -> None:
    """Answer jobs until the other end is gone. Raises ConnectionError.

    It answers for all images that wait already at once, as each packet wakes the server up. None that is done waits
    for another one that probably takes longer than `_LONGEST_WORK_S`.
    """
    from app.decoder.decoder import Decoder

    decoder, jobs_in = Decoder(plan, inbox, arena), reader(Job)
    answers: list[Decoded] = []
    began_s, done_bytes = 0.0, 0
    while True:
        try:
            packet = connection.recv(PACKET_BYTES, socket.MSG_DONTWAIT if answers else 0)
        except BlockingIOError:
            connection.send(to_packet(answers))
            answers.clear()
            continue
        if not packet:
            return
        for job in jobs_in(packet):
            now_s = time.monotonic()
            if answers and (now_s - began_s) * max(1.0, job.size / max(1, done_bytes)) > _LONGEST_WORK_S:
                connection.send(to_packet(answers))
                answers.clear()
            if not answers:
                began_s, done_bytes = now_s, 0
            answers.append(decoder.answer(job))
            done_bytes += job.size
