"""The child process of app.ingress.converter: reads requests from its standard input, a socket, until that ends.

Owns: which conversion a kind is, and the limits of the process. Must not import anything large: it starts while a
client waits.
"""

from __future__ import annotations

import logging
import resource
import socket
from collections.abc import Callable

import orjson

from app.errors import ServiceError, internal_error, without_frames
from app.ingress.converter import ANSWER, DOCUMENT, FAILED, INSTANCES, LEAVING, MESSAGE, OUTPUTS, REQUEST, TENSORS
from app.protocols import documents, wire

_MOST_MEMORY_BYTES = 4 * 2**30
_KEPT_MEMORY_BYTES = 80 * 2**20
"""More than most bodies of 20 MB leave behind. A child that has grown beyond it ends; the next request has another."""

log = logging.getLogger("anychip.converter")


def main() -> None:
    """Convert until the server closes its end, or until memory has grown that is better given back."""
    resource.setrlimit(resource.RLIMIT_AS, (_MOST_MEMORY_BYTES, _MOST_MEMORY_BYTES))
    with socket.socket(fileno=0) as connection:
        while head := _received(connection, REQUEST.size):
            kind, argument, size = REQUEST.unpack(head)
            flags, answer = _converted(kind, argument, _received(connection, size))
            leaving = _resident_bytes() > _KEPT_MEMORY_BYTES
            connection.sendall(ANSWER.pack(flags | (LEAVING if leaving else 0), len(answer)))
            connection.sendall(answer)
            if leaving:
                return


def _converted(kind: int, argument: int, payload: bytes) -> tuple[int, bytes]:
    try:
        return 0, _CONVERSIONS[kind](payload, argument)
    except ServiceError as error:
        failure = error
    except MemoryError:
        failure = ServiceError("INVALID_REQUEST", "the request takes more memory than it may have here")
    except Exception:
        log.exception("a conversion failed")
        failure = internal_error()
    without_frames(failure)  # In them lies what was read, which would stay until the next collection of garbage.
    return FAILED, orjson.dumps({"code": failure.code, "message": failure.message})


def _instances(payload: bytes, max_images: int) -> bytes:
    return wire.to_bytes(documents.read_instances(payload, max_images))


def _tensors(payload: bytes, header_bytes: int) -> bytes:
    return documents.pack(*documents.read_tensors(payload, header_bytes or None))


def _message(payload: bytes, _: int) -> bytes:
    from app.grpc.contents import raw_form  # Needs protobuf, which HTTP alone does not.

    return raw_form(payload)


def _outputs(payload: bytes, _: int) -> bytes:
    return documents.write_outputs(payload)


def _document(payload: bytes, _: int) -> bytes:
    return documents.pack(*documents.read_with_image(payload))


_CONVERSIONS: dict[int, Callable[[bytes, int], bytes]] = {
    INSTANCES: _instances,
    TENSORS: _tensors,
    MESSAGE: _message,
    OUTPUTS: _outputs,
    DOCUMENT: _document,
}


def _resident_bytes() -> int:
    # Not getrusage: its highest value counts the process that this one was made from.
    with open("/proc/self/statm", "rb") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize()


def _received(connection: socket.socket, size: int) -> bytes:
    """So many bytes; none where the other end has closed before the first."""
    received = bytearray(size)
    view = memoryview(received)
    while view:
        count = connection.recv_into(view)
        if not count:
            return b""
        view = view[count:]
    return bytes(received)
