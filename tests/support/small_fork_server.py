"""Fork server whose children only wait for a word, and whose forks fail on a test's demand."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Sequence
from pathlib import Path

from app.processes.forking import fork_on_request

FAILS = "ANYCHIP_TEST_FORK_FAILS"
"""File: while it exists, `os.fork` fails as at a limit on processes. Its content says which of the two forks."""


def main(control: socket.socket, server: int) -> None:
    fork, here = os.fork, os.getpid()

    def forked() -> int:
        wanted = Path(os.environ[FAILS])
        which = "first" if os.getpid() == here else "second"
        if wanted.exists() and wanted.read_text() == which:
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return fork()

    os.fork = forked
    fork_on_request(control, server, _child)


def _child(_: int, descriptors: Sequence[int]) -> None:
    """End with the status that it is told, or with the other end of its socket."""
    word = socket.socket(fileno=descriptors[0]).recv(1)
    raise SystemExit(word[0] if word else 0)
