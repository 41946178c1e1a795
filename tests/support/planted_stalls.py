"""Stall planted in a server's process (`planted` of `running`): on demand it holds the event loop up in a request.

A file called `stall` in the service's folder says what the next request meets: `computes` or `blocks`.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from app.ingress.ingress import Ingress
from tests.support.loop_guard import BLOCKED_S, COMPUTED_TURNS

_ORDERS = Path("stall")
_answer = Ingress.answer


def _stall() -> None:
    if _ORDERS.exists():
        order = _ORDERS.read_text()
        _ORDERS.unlink()
        if order == "computes":
            for _ in range(10 * COMPUTED_TURNS):
                pass
        else:
            time.sleep(5 * BLOCKED_S)


async def _stalling(self: Ingress, *given: Any) -> Any:
    _stall()
    return await _answer(self, *given)


Ingress.answer = _stalling  # type: ignore[method-assign, assignment]
