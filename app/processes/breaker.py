"""Circuit breaker of a place whose children die: the next start is at once, after a pause, or the place is broken.

A death lengthens the pause before the next start if the child had answered nothing, or if it is the fourth or a later
one within a minute. Five deaths of the first kind in a row, or ten deaths within a minute, break the place: it is
tried once a minute, until a child has served for a minute.
"""

from __future__ import annotations

from collections import deque

BACKOFF_S = (0.0, 0.5, 2.0, 5.0)
BROKEN_S = 60.0
WINDOW_S = 60.0
IN_A_ROW = 5
IN_WINDOW = 10
_FREE = 2
"""Deaths within the window that lengthen no pause: people and faults end workers now and then."""


class Breaker:
    """Circuit breaker of one place. `reason`: why the place is broken, empty while it is not; `in_a_row`: children that
    died one after the other and had answered nothing.
    """

    def __init__(self, *, breaks: bool = True) -> None:
        """Begin with no death. `breaks`: False if only deaths in a row count, and no pause is longer than BACKOFF_S."""
        self.reason = ""
        self.in_a_row = 0
        self._breaks = breaks
        self._died_s: deque[float] = deque()

    def died(self, now_s: float, *, answered: bool = False, served_s: float = 0.0) -> float:
        """Count a death at `now_s` after `served_s` of service; return the pause before the next start."""
        self.in_a_row = 1 if answered else self.in_a_row + 1
        if not self._breaks:
            return BACKOFF_S[min(self.in_a_row, len(BACKOFF_S)) - 1]
        self._died_s.append(now_s)
        while now_s - self._died_s[0] > WINDOW_S:
            self._died_s.popleft()
        if served_s >= WINDOW_S:
            self.reason = ""
        if self.in_a_row >= IN_A_ROW:
            self.reason = f"{self.in_a_row} workers died in a row"
        elif len(self._died_s) >= IN_WINDOW:
            self.reason = f"{len(self._died_s)} workers died within {WINDOW_S:g} s"
        if self.reason:
            return BROKEN_S
        return BACKOFF_S[min(max(self.in_a_row, len(self._died_s) - _FREE), len(BACKOFF_S)) - 1]
