"""Rules of HTTP itself (RFC 9112) for a head, beside those that the parser checks.

Owns: these rules and their statuses. Must not know what is asked, nor how a connection ends.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

_AUTHORITY = re.compile(rb"[A-Za-z][A-Za-z0-9+.-]*://([^/?#]*).*", re.DOTALL)
_OTHER_PROTOCOL = re.compile(rb"[\r\n]*[^\r\n]* (?!HTTP/)[A-Za-z]+/[\d.]+\r?\n")


class Refusal(NamedTuple):
    """Reason for the refusal of a head, and its status."""

    status: int
    message: str


_NO_HTTP = Refusal(400, "this is no HTTP/1.1 request")


def refusal_of_line(head: bytes) -> Refusal | None:
    """Return the fault of a request line that the parser takes for HTTP, such as RTSP/1.0's."""
    return _NO_HTTP if _OTHER_PROTOCOL.match(head) else None


def refusal_of(version: str, headers: Iterable[tuple[bytes, bytes]], target: bytes = b"/") -> Refusal | None:
    """Return the fault of a head with this version, these headers, names in lower case, and this target."""
    if version not in ("1.0", "1.1"):
        return _NO_HTTP if version == "0.9" else Refusal(505, f"HTTP/{version} is not spoken here; use HTTP/1.1")
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
