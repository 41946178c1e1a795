"""Circuit breaker of a replica whose workers die: the next start is at once, after a pause, or the replica is broken.

Owns: the counts of deaths, in a row and in a window of time. Must not know workers, nor a clock: callers pass the time.

A death lengthens the pause before the next start if the worker had answered nothing, or if it is the fourth or a later
one within a minute. Five deaths of the first kind in a row, or ten deaths within a minute, break the replica: it is
tried once a minute, until a worker has served for a minute.
"""

from __future__ import annotations

from collections import deque

from app.processes.fork_server import BACKOFF_S

BROKEN_S = 60.0
WINDOW_S = 60.0
IN_A_ROW = 5
IN_WINDOW = 10
_FREE = 2
"""Deaths within the window that lengthen no pause: people and faults end workers now and then."""


class Breaker:
    """Circuit breaker of one replica. `reason`: why the replica is broken, empty while it is not."""

    def __init__(self) -> None:
        self.reason = ""
        self._in_a_row = 0  # Workers that had answered nothing.
        self._died_s: deque[float] = deque()

    def died(self, now_s: float, *, answered: bool = False, served_s: float = 0.0) -> float:
        """Count a death at `now_s` after `served_s` of service; return the pause before the next start."""
        self._in_a_row = 1 if answered else self._in_a_row + 1
        self._died_s.append(now_s)
        while now_s - self._died_s[0] > WINDOW_S:
            self._died_s.popleft()
        if served_s >= WINDOW_S:
            self.reason = ""
        if self._in_a_row >= IN_A_ROW:
            self.reason = f"{self._in_a_row} workers died in a row"
        elif len(self._died_s) >= IN_WINDOW:
            self.reason = f"{len(self._died_s)} workers died within {WINDOW_S:g} s"
        if self.reason:
            return BROKEN_S
        return BACKOFF_S[min(max(self._in_a_row, len(self._died_s) - _FREE), len(BACKOFF_S)) - 1]
