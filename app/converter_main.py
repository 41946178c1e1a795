"""The child process of app.ingress.converter: it reads requests from its standard input, a socket, until that ends.

Owns: the limits of the process. Must not import anything large: it starts while a client waits.
"""

from __future__ import annotations

import logging
import resource
import socket
from pkgutil import resolve_name

import orjson

from app.errors import ServiceError, internal_error, without_frames
from app.ingress.converter import ANSWER, FAILED, LEAVING, REQUEST

_MOST_MEMORY_BYTES = 4 * 2**30
_KEPT_MEMORY_BYTES = 80 * 2**20
"""Most memory of a child, more than most bodies of 20 MB leave. A larger child ends; the next request has another."""

log = logging.getLogger("anychip.converter")


def main() -> None:
    """Convert until the server closes its end, or until so much memory has grown that the process should end."""
    resource.setrlimit(resource.RLIMIT_AS, (_MOST_MEMORY_BYTES, _MOST_MEMORY_BYTES))
    kept_bytes = max(_KEPT_MEMORY_BYTES, _resident_bytes())
    with socket.socket(fileno=0) as connection:
        while head := _received(connection, REQUEST.size):
            named, argument, size = REQUEST.unpack(head)
            name = _received(connection, named).decode()
            flags, answer = _converted(name, argument, _received(connection, size))
            leaving = _resident_bytes() > kept_bytes
            connection.sendall(ANSWER.pack(flags | (LEAVING if leaving else 0), len(answer)))
            connection.sendall(answer)
            if leaving:
                return


def _converted(name: str, argument: int, payload: bytes) -> tuple[int, bytes]:
    try:
        return 0, resolve_name(name)(payload, argument)
    except ServiceError as error:
        failure = error
    except MemoryError:
        failure = ServiceError("INVALID_REQUEST", "the request takes more memory than it may have here")
    except Exception:
        log.exception("a conversion failed")
        failure = internal_error()
    without_frames(failure)  # The frames hold the read data, which would stay until the next collection of garbage.
    return FAILED, orjson.dumps({"code": failure.code, "message": failure.message})


def _resident_bytes() -> int:
    try:
        with open("/proc/self/statm", "rb") as statm:
            return int(statm.read().split()[1]) * resource.getpagesize()
    except PermissionError:
        # A confined process that starts this one may read only its own entry of /proc, and this one has another number.
        # The peak is left, which counts the process that this one was made from.
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _received(connection: socket.socket, size: int) -> bytes:
    received = bytearray(size)
    view = memoryview(received)
    while view:
        count = connection.recv_into(view)
        if not count:
            return b""
        view = view[count:]
    return bytes(received)
