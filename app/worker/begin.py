"""The first message to a worker's process, read before it loads any library.

Must not import torch, models or backends; the modules that it imports must not either.
"""

from __future__ import annotations

import msgspec

from app.logs import Style
from app.processes.arena import Pool


class Begin(msgspec.Struct, frozen=True, array_like=True):
    """First message to a process, with all that it needs to know before anything else.

    `path`: its path for modules, as the server has it now. `bare`: it has no other environment, nor anything else of
    the server's, as it runs a file that is a program. `program`: "module:function" that this process runs with its
    channel instead of a worker.
    """

    name: str
    environment: dict[str, str]
    log_style: Style
    pools: tuple[Pool, ...]
    path: list[str]
    bare: bool = False
    program: str = ""


def to_process(begin: Begin) -> bytes:
    """Encode the message for `begin_of` at the other end."""
    return msgspec.msgpack.encode(begin)


def begin_of(data: bytes) -> Begin:
    """Decode the server's first message. Raises ValueError for anything else."""
    return msgspec.msgpack.decode(data, type=Begin)
