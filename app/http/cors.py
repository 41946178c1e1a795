"""CORS (the Fetch standard): web pages may use this service if their origins were named; none by default.

Owns: its headers, and the answer to a browser's preflight request. Must not decide on access: a page sends a key like
every client, and cookies are never asked for.
"""

from __future__ import annotations

from collections.abc import Iterable

Header = tuple[bytes, bytes]

_ASKED_FIRST = b"access-control-request-method"
_METHODS = b"GET, POST, PUT"
_SENT = (
    b"authorization, content-type, inference-header-content-length, traceparent, x-api-key, x-priority, x-request-id, "
    b"x-timeout-ms"
)
_SHOWN = b"inference-header-content-length, retry-after, server-timing, traceparent, x-request-id"
_REMEMBERED_S = b"600"


class Cors:
    """CORS for these origins, such as `https://app.example.com`; `*`: every one."""

    def __init__(self, origins: Iterable[str]) -> None:
        self._origins = frozenset(origin.rstrip("/").lower().encode() for origin in origins)
        self.on = bool(self._origins)

    def headers(self, asked: Iterable[Header]) -> list[Header]:
        """Return the CORS headers of the answer to these request headers; only `vary` for a page not named."""
        origin = next((value for name, value in asked if name == b"origin"), b"")
        vary = (b"vary", b"origin")
        if not origin or not (b"*" in self._origins or origin.lower() in self._origins):
            return [vary]
        return [vary, (b"access-control-allow-origin", origin), (b"access-control-expose-headers", _SHOWN)]

    def preflight(self, method: str, asked: list[Header]) -> list[Header] | None:
        """Return the headers of the answer to a preflight request; None if the request is none."""
        if method != "OPTIONS" or not any(name == _ASKED_FIRST for name, _ in asked):
            return None
        said = self.headers(asked)
        if len(said) > 1:
            said += [
                (b"access-control-allow-methods", _METHODS),
                (b"access-control-allow-headers", _SENT),
                (b"access-control-max-age", _REMEMBERED_S),
            ]
        return said
