"""The audit: one JSON line for every call that changes something, or tried to.

Refused calls of strangers must not fill the disk: long values are cut, and beyond a rate only the number of these calls
is written, as `left_out` of the next line. Calls that did something, or came with a key that may, are always there.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from app import clock
from app.logs import AUDIT
from app.pace import Pace

_MOST_CHARACTERS = 200
_REFUSED_PER_MINUTE, _REFUSED_AT_ONCE = 60, 1000

log = logging.getLogger(AUDIT)


class Audit:
    """Audit of one process."""

    def __init__(self) -> None:
        self._refused = Pace(_REFUSED_PER_MINUTE, _REFUSED_AT_ONCE)
        self._left_out = 0

    def record(
        self,
        action: str,
        subject: Mapping[str, str],
        *,
        key: str,
        address: str,
        weights_sha256: str,
        outcome: str,
        seconds: float,
    ) -> None:
        """Write a line. `subject`: the call's object, such as its model; `outcome`: OK or the error's code."""
        if outcome == "FORBIDDEN" or (outcome != "OK" and not key):
            if self._refused.wait_s(clock.monotonic()):
                self._left_out += 1
                return
            self._refused.take()
        named = {"key": key, "address": address, **subject, "weights_sha256": weights_sha256, "outcome": outcome}
        line: dict[str, object] = {
            name: text[:_MOST_CHARACTERS] for name, text in named.items() if text or name != "weights_sha256"
        }
        line["ms"] = round(seconds * 1e3, 3)
        if self._left_out:
            line["left_out"], self._left_out = self._left_out, 0
        log.info(action[:_MOST_CHARACTERS], extra={"fields": line})


record = Audit().record
