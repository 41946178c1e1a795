"""A token bucket: how often something may be begun. Must not know what; the clock is a parameter, in seconds."""

from __future__ import annotations


class Pace:
    """Token bucket of so many a minute in the long run, and `burst` at once after a rest."""

    __slots__ = ("_left", "_most", "_rate", "_seen_s")

    def __init__(self, per_minute: float, burst: float) -> None:
        self._rate = per_minute / 60
        self._left = self._most = burst
        self._seen_s = 0.0

    def wait_s(self, now_s: float, size: float = 1) -> float:
        """Return the seconds until `size` more may be taken; 0: now. A size that never fits waits for all there is."""
        if now_s > self._seen_s:
            self._left = min(self._most, self._left + (now_s - self._seen_s) * self._rate)
            self._seen_s = now_s
        if size <= self._left:
            return 0.0
        return max(0.0, min(size, self._most) - self._left) / self._rate

    def take(self, size: float = 1) -> None:
        """Count what is begun at the moment that `wait_s` was asked about."""
        self._left -= size
