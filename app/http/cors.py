"""Which web pages may ask this service: none, or those whose origins were named (CORS, in the Fetch standard).

Owns: the headers of that, and the answer to a browser's question beforehand. Must not decide who may ask: a page sends
a key like every client, and cookies are never asked for.
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
    """For these origins, such as `https://app.example.com`; `*`: every one."""

    def __init__(self, origins: Iterable[str]) -> None:
        self._origins = frozenset(origin.rstrip("/").lower().encode() for origin in origins)
        self.on = bool(self._origins)

    def headers(self, asked: Iterable[Header]) -> list[Header]:
        """What an answer to a request with these headers says to a browser; nothing to a page that was not named."""
        origin = next((value for name, value in asked if name == b"origin"), b"")
        vary = (b"vary", b"origin")
        if not origin or not (b"*" in self._origins or origin.lower() in self._origins):
            return [vary]
        return [vary, (b"access-control-allow-origin", origin), (b"access-control-expose-headers", _SHOWN)]

    def preflight(self, method: str, asked: list[Header]) -> list[Header] | None:
        """The answer to a browser that asks first whether a page may ask; None: the request is none of these."""
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
