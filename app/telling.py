"""Lines on stderr that say what a long command does: `opening cars`.

Must not import more than Python's own modules, app.clock and app.pace: it begins before all else.
"""

from __future__ import annotations

import sys
from contextlib import suppress

from app import clock
from app.pace import Pace

_PACE = Pace(15, 1)
"""Lines a minute, one at once: a step that is begun sooner is not logged."""


def say(text: str) -> None:
    """Say what is done now, unless another line was written less than 4 s ago."""
    if not text or _PACE.wait_s(clock.monotonic()):
        return
    _PACE.take()
    if "://" in text:  # Only then, as this takes time to import.
        from models.addresses import without_secrets

        text = without_secrets(text)
    if sys.stderr is not None:
        with suppress(OSError):  # Nobody reads it any more.
            print(text, file=sys.stderr, flush=True)
