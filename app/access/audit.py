"""The audit: one JSON line for every call that changes something, or tried to.

    {"time":…,"logger":"anychip.audit","message":"load","key":"ops","address":"127.0.0.1","model":"dogs",
     "weights_sha256":"…","outcome":"OK","ms":812.4}

Refused calls of strangers must not fill the disk: long values are cut, and beyond a rate only the number of these calls
is written, as `left_out` of the next line. Calls that did something, or came with a key that may, are always there.

Owns: the content of such a line, and which are left out. Must not decide who may call.
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


def record(
    action: str,
    subject: Mapping[str, str],
    *,
    key: str,
    address: str,
    weights_sha256: str,
    outcome: str,
    seconds: float,
) -> None:
    """Write the line. `subject`: the call's object, such as its model; `outcome`: OK or the error's code."""
    fields: dict[str, object] = {"key": key, "address": address, **subject}
    if weights_sha256:
        fields["weights_sha256"] = weights_sha256
    _refused.write(action, {**fields, "outcome": outcome, "ms": round(seconds * 1e3, 3)})


class _Refused:
    """Lines of refused calls of strangers, within a rate."""

    def __init__(self) -> None:
        self._pace = Pace(_REFUSED_PER_MINUTE, _REFUSED_AT_ONCE)
        self._left_out = 0

    def write(self, action: str, fields: Mapping[str, object]) -> None:
        """Write a line, or count one that is left out."""
        if fields["outcome"] == "FORBIDDEN" or (fields["outcome"] != "OK" and not fields["key"]):
            if self._pace.wait_s(clock.monotonic()):
                self._left_out += 1
                return
            self._pace.take()
        line = {name: each[:_MOST_CHARACTERS] if isinstance(each, str) else each for name, each in fields.items()}
        if self._left_out:
            line["left_out"], self._left_out = self._left_out, 0
        log.info(action[:_MOST_CHARACTERS], extra={"fields": line})


_refused = _Refused()
