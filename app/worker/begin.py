"""The first message to a worker's process, read before it loads any library.

Must not import torch, models or backends, as no module that it imports may.
"""

from __future__ import annotations

import msgspec

from app.logs import Style
from app.processes.arena import Pool


class Begin(msgspec.Struct, frozen=True, array_like=True):
    """What the process should know before all else.

    `path`: where it finds modules, as the server does now. `bare`: it has no other environment, nor anything else of
    the server's: it runs a file that is a program. `program`: "module:function" that this process runs with its
    channel, and is no worker.
    """

    name: str
    environment: dict[str, str]
    log_style: Style
    pools: tuple[Pool, ...]
    path: list[str]
    bare: bool = False
    program: str = ""


def to_process(begin: Begin) -> bytes:
    """For `begin_of` at the other end."""
    return msgspec.msgpack.encode(begin)


def begin_of(data: bytes) -> Begin:
    """What the server has sent. Raises ValueError for anything else."""
    return msgspec.msgpack.decode(data, type=Begin)
