"""Heads of requests before the parser reads them: their bounds, and the rules of HTTP itself (RFC 9112) beside its own.

Owns: these rules and what they answer. Must not know what is asked, nor how a connection ends.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple, NoReturn

from app.errors import Code

HEAD_BYTES = 64 * 1024
HEADERS = 100
_AUTHORITY = re.compile(rb"[A-Za-z][A-Za-z0-9+.-]*://([^/?#]*).*", re.DOTALL)
_OTHER_PROTOCOL = re.compile(rb"[\r\n]*[^\r\n]* (?!HTTP/)[A-Za-z]+/[\d.]+\r?\n")
_HEAD_END = re.compile(rb"\r?\n\r?\n")
_UPGRADE = re.compile(rb"\r\n(?:upgrade|http2-settings):[^\r\n]*", re.IGNORECASE)


class Refusal(NamedTuple):
    """Reason for the refusal of a head. `status`: 0: that of the code."""

    status: int
    message: str
    code: Code = "INVALID_REQUEST"


NO_HTTP = Refusal(400, "this is no HTTP/1.1 request")


class HeadReader:
    """Head of the request that comes next on a connection, until the parser has read it whole.

    `open`: the next bytes belong to it; False between its end and its message's. `refusal`: why it is refused.
    """

    def __init__(self) -> None:
        self.open = True
        self.refusal: Refusal | None = None
        self.bytes = b""
        """Beginning of a head that is not whole."""
        self._headers = 0

    @property
    def is_awaited(self) -> bool:
        """True if no request has begun whose end has not arrived."""
        return self.open and not self.bytes

    def whole(self, data: bytes) -> bytes:
        """Return the bytes that have come, once they hold the end of a head; until then, or if it is refused, nothing.

        HTTP/2 is not spoken here. Java's client asks for it with every request (`Upgrade: h2c`), which a server may
        ignore; the parser would take what follows the head for something else than its body.
        """
        searched = max(0, len(self.bytes) - 3)
        if self.bytes:
            data, self.bytes = self.bytes + data, b""
        elif not data[:1].isalpha() and data[:1] not in (b"\r", b"\n"):
            return data  # No request line begins like this: the parser says so at once.
        found = _HEAD_END.search(data, searched, HEAD_BYTES + 4)
        if found is None:
            if len(data) <= HEAD_BYTES:
                self.bytes = data
            else:
                self.refusal = Refusal(0, f"the headers are larger than {HEAD_BYTES} bytes", "HEADERS_TOO_LARGE")
            return b""
        if _OTHER_PROTOCOL.match(data):  # The parser takes RTSP/1.0's request line for HTTP.
            self.refusal = NO_HTTP
            return b""
        end = found.end()
        return _UPGRADE.sub(b"", data[:end]) + data[end:] if _UPGRADE.search(data, 0, end) else data

    def begin(self) -> None:
        """Begin the next one."""
        self._headers = 0
        self.open = True

    def count(self) -> None:
        """Count a header. Raises ValueError for one too many."""
        self._headers += 1
        if self._headers > HEADERS:
            self._refuse(Refusal(0, f"there are more than {HEADERS} headers", "HEADERS_TOO_LARGE"))

    def end(self, version: str, headers: Iterable[tuple[bytes, bytes]], target: bytes) -> None:
        """End it. Raises ValueError if it is refused."""
        self.open = False
        if refusal := refusal_of(version, headers, target):
            self._refuse(refusal)

    def _refuse(self, refusal: Refusal) -> NoReturn:
        self.refusal = refusal
        raise ValueError(refusal.message)


def refusal_of(version: str, headers: Iterable[tuple[bytes, bytes]], target: bytes) -> Refusal | None:
    """Return the fault of a head with this version, these headers, names in lower case, and this target."""
    if version not in ("1.0", "1.1"):
        return NO_HTTP if version == "0.9" else Refusal(505, f"HTTP/{version} is not spoken here; use HTTP/1.1")
    hosts, host, codings = 0, b"", b""
    for name, value in headers:
        if name == b"host":
            hosts, host = hosts + 1, value
        elif name == b"transfer-encoding":
            codings += value + b","
    if hosts > 1 or (not hosts and version == "1.1"):
        # A proxy in front may have believed another of them.
        return Refusal(400, "an HTTP/1.1 request has one Host header, no more and no less")
    if not target.startswith((b"/", b"*")) and _AUTHORITY.sub(rb"\1", target).lower() != host.strip().lower():
        # The target's host would count, and only the header's is checked.
        return Refusal(400, "the request's target names another host than the Host header")
    if not codings:
        return None
    if version == "1.0":
        return Refusal(400, "HTTP/1.0 has no Transfer-Encoding")
    named = [each for coding in codings.lower().split(b",") if (each := coding.strip())]
    if named == [b"chunked"]:
        return None
    if named[-1:] == [b"chunked"] and named.count(b"chunked") == 1:
        return Refusal(501, "of transfer codings only chunked is read here; compress with Content-Encoding")
    return Refusal(400, "the Transfer-Encoding does not end with chunked")
