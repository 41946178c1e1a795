"""What a process that reads untrusted bytes must not be able to do, each tried for real: run in the process itself."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import socket
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path


def attempts(secret: str, target: str) -> dict[str, Callable[[], object]]:
    """By name. `secret`: a file that it must not read; `target`: one that it must not write."""
    parent = os.getppid()

    def ptrace() -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.ptrace(16, parent, 0, 0) != 0:  # PTRACE_ATTACH
            raise OSError(ctypes.get_errno(), "ptrace")

    return {
        "read a file": lambda: Path(secret).read_text(),
        "write a file": lambda: Path(target).write_text("x"),
        "make a folder": lambda: Path(target).mkdir(),
        "delete a file": lambda: Path(secret).unlink(),
        "open a socket": lambda: socket.socket().close(),
        "open a socket of another kind": lambda: socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).close(),
        "run a shell": lambda: subprocess.run(["/bin/sh", "-c", "true"], check=True),
        "become a shell": lambda: os.execv("/bin/sh", ["/bin/sh", "-c", "true"]),
        "fork": lambda: os.fork() or os._exit(0),
        "signal its parent": lambda: os.kill(parent, 0),
        "read its parent's memory": lambda: Path(f"/proc/{parent}/environ").read_bytes(),
        "trace its parent": ptrace,
    }


def tried(secret: str, target: str) -> dict[str, str]:
    """How each ended: "refused", or what it did instead."""
    found = {}
    for name, attempt in attempts(secret, target).items():
        try:
            attempt()
        except (PermissionError, BlockingIOError):
            found[name] = "refused"
        except BaseException as error:
            found[name] = f"{type(error).__name__}: {error}"
        else:
            found[name] = "done"
    return found


def thread() -> str:
    """Whether a thread can be started."""
    try:
        started = threading.Thread(target=int)
        started.start()
        started.join()
    except RuntimeError:
        return "refused"
    return "done"


# Of decoders: memory that no limit of theirs counts, and the service's streams.


def grown() -> list[int]:
    """Descriptors of memory that this process could make larger."""
    found = []
    for descriptor in range(3, 64):
        try:
            os.lseek(descriptor, 0, os.SEEK_END)
        except OSError:  # It is none, or a socket.
            continue
        with contextlib.suppress(OSError):
            os.write(descriptor, b"x")
            found.append(descriptor)
    return found


def forge_lines(lines: int) -> None:
    """Write what could be lines of the audit, to the streams and through logging."""
    for stream in (1, 2):
        os.write(stream, FORGED.encode() + b"\n")
    for _ in range(lines):
        logging.getLogger("anychip.audit").info(FORGED)
        logging.getLogger().critical(FORGED)


FORGED = '{"logger":"anychip.audit","message":"load","key":"forged"}'
