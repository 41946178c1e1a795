"""Clock of the running loop that a test can put on: events of later seconds happen at once.

    clock = Ahead(); ...; clock.put_on(10)

Sockets and threads are real, and so is time otherwise: limits in it are long, so that no busy machine reaches one.
"""

from __future__ import annotations

import asyncio
import heapq
from typing import Any


class Ahead:
    """Clock of the loop of asyncio in which it is made."""

    def __init__(self) -> None:
        self._loop: Any = asyncio.get_running_loop()
        self._real_s, self._ahead_s = self._loop.time, 0.0
        vars(self._loop)["time"] = lambda: self._real_s() + self._ahead_s

    def put_on(self, seconds: float) -> None:
        """Let so much time pass. Timers due in it run before anything that came meanwhile, as in uvloop."""
        self._ahead_s += seconds
        due_s, timers = self._loop.time(), self._loop._scheduled
        while timers and timers[0].when() <= due_s:
            timer = heapq.heappop(timers)
            timer._scheduled = False
            self._loop._ready.append(timer)  # A cancelled one does nothing there.
            if timer.cancelled():
                self._loop._timer_cancelled_count -= 1
