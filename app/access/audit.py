"""The audit: one JSON line for every call that changes something, or tried to.

    {"time":…,"logger":"anychip.audit","message":"load","key":"ops","address":"127.0.0.1","model":"dogs",
     "weights_sha256":"…","outcome":"OK","ms":812.4}

Owns: what such a line says. Must not decide who may call.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextvars import ContextVar

from app.logs import AUDIT

log = logging.getLogger(AUDIT)

weights_sha256: ContextVar[str] = ContextVar("anychip_weights_sha256", default="")
"""Of what this task has loaded, where a transport has no better place for it."""


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
    """Write the line. `subject`: what the call was about, such as its model; `outcome`: OK or the error's code."""
    fields: dict[str, object] = {"key": key, "address": address, **subject}
    if weights_sha256:
        fields["weights_sha256"] = weights_sha256
    log.info(action, extra={"fields": {**fields, "outcome": outcome, "ms": round(seconds * 1e3, 3)}})
