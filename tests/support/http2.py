"""Client of HTTP/2 that does what gRPC's own would not: many lasting streams, answers without room for them."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator

from tests.support.load import WAIT_S

_DATA, _HEADERS, _SETTINGS = 0, 1, 4
_END_STREAM, _END_HEADERS, _ACK = 1, 4, 1
_INITIAL_WINDOW = 4


class Http2Client:
    """Connection from an address. `window`: how much of each answer it takes before it must ask for more; it
    never asks.
    """

    def __init__(self, port: int, source: str = "127.0.0.1", window: int = 65535) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), WAIT_S, (source, 0))
        settings = struct.pack("!HI", _INITIAL_WINDOW, window)
        self.socket.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(_SETTINGS, 0, 0, settings))
        while next(self.frames())[0] != _SETTINGS:
            pass
        self.socket.sendall(_frame(_SETTINGS, _ACK, 0, b""))
        self._stream = -1

    def ask(self, path: str, message: bytes) -> None:
        """Begin one more call with its only message."""
        self._stream += 2
        headers = {
            ":method": "POST",
            ":scheme": "http",
            ":path": path,
            ":authority": "localhost",
            "content-type": "application/grpc",
            "te": "trailers",
        }
        block = b"".join(b"\0" + _text(name) + _text(value) for name, value in headers.items())
        data = b"\0" + struct.pack("!I", len(message)) + message
        self.socket.sendall(
            _frame(_HEADERS, _END_HEADERS, self._stream, block) + _frame(_DATA, _END_STREAM, self._stream, data)
        )

    def frames(self) -> Iterator[tuple[int, int, int, bytes]]:
        """Yield kind, flags, stream and payload of each frame, until the server closes the connection."""
        while head := self._exactly(9):
            size, kind, flags, stream = int.from_bytes(head[:3], "big"), head[3], head[4], head[5:]
            yield kind, flags, int.from_bytes(stream, "big"), self._exactly(size)

    def begun(self, count: int) -> tuple[int, int]:
        """Wait for the heads of so many answers; return how many have begun, and how many were only refused."""
        begun = refused = 0
        while begun + refused < count:
            kind, flags, _, _ = next(self.frames())
            if kind == _HEADERS:
                refused += flags & _END_STREAM
                begun += not flags & _END_STREAM
        return begun, refused

    def close(self) -> None:
        """Close the connection."""
        self.socket.close()

    def _exactly(self, size: int) -> bytes:
        parts = b""
        while len(parts) < size and (data := self.socket.recv(size - len(parts))):
            parts += data
        return parts if len(parts) == size else b""


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def _text(text: str) -> bytes:
    return bytes([len(text)]) + text.encode()
