"""HTTP/1.1 for a load generator: whole requests, and the end of an answer.

Owns: bytes. Must not open connections.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from typing import NamedTuple


class Address(NamedTuple):
    """Address of a server; HTTPS if `tls` is set."""

    host: str
    port: int
    tls: ssl.SSLContext | None = None


Where = int | Address
"""Address of a server; a number is a port of this machine."""


class WireAnswer(NamedTuple):
    """Complete answer: its status, and whether its connection may carry another request."""

    status: str
    keeps_alive: bool


class AnswerReader:
    """Parser that finds the end of an answer in the bytes of a connection with one request in flight at a time.

    Needs Content-Length or chunks: an answer without either cannot be told from one that was cut off, and counts as
    cut off.
    """

    def __init__(self) -> None:
        self._received = b""

    def feed(self, data: bytes) -> WireAnswer | None:
        """Take the bytes that arrived; return the answer once it is complete."""
        self._received += data
        head, separator, body = self._received.partition(b"\r\n\r\n")
        lowered = head.lower()
        if not separator:
            return None
        start = lowered.find(b"\r\ncontent-length:") + 17
        if start >= 17:
            length = int(lowered[start:].split(b"\r\n", 1)[0])
        elif b"\r\ntransfer-encoding: chunked" in lowered:
            length = _chunked_length(body)
        else:
            return None
        if length < 0 or len(body) < length:
            return None
        self._received = body[length:]
        return WireAnswer(head[9:12].decode(), b"\r\nconnection: close" not in lowered)


def _chunked_length(body: bytes) -> int:
    """Return the length in bytes of a body in chunks, trailers included; -1 if it is not complete."""
    place = 0
    while True:
        end = body.find(b"\r\n", place)
        if end < 0:
            return -1
        size = int(body[place:end].partition(b";")[0], 16)
        if not size:
            if body[end : end + 4] == b"\r\n\r\n":
                return end + 4
            last = body.find(b"\r\n\r\n", end)
            return last + 4 if last >= 0 else -1
        place = end + 2 + size + 2
        if place > len(body):
            return -1


def request_bytes(
    path: str, body: bytes, content_type: str, headers: Mapping[str, str] | None = None, host: str = "localhost"
) -> bytes:
    """Build a whole HTTP/1.1 POST request."""
    fields = {"Host": host, "Content-Type": content_type, "Content-Length": str(len(body)), **(headers or {})}
    lines = (f"POST {path} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items()))
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body
