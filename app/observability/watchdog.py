"""Watchdog of the event loop: stalls measured in the loop, and reported from a thread outside it.

A stall is time in which the loop could have run and did not: a call that blocks, or one that computes for long. Time in
which the whole process was stopped (SIGSTOP, a container's pause), or waited for a processor, is none.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable

from app import clock

log = logging.getLogger("anychip.watchdog")

_TICK_S = 0.05
_WATCH_S = 0.25


class LoopWatchdog:
    """Watchdog of the running event loop from `start` until `close`. `longest_s`: the longest stall since then."""

    def __init__(self, report_s: float = 1.0, on_longest: Callable[[float], None] = lambda _: None) -> None:
        """Log stalls of at least `report_s` seconds. `on_longest` hears each new longest stall, in seconds."""
        self.longest_s = 0.0
        self._report_s = report_s
        self._on_longest = on_longest
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="loop watchdog", daemon=True)
        self._timer: asyncio.TimerHandle | None = None
        self._wakes = 0  # Wakes of the thread: while they go on, the process is not stopped.
        self._reported = False

    def start(self) -> None:
        """Begin, in the loop's own thread."""
        self._loop = asyncio.get_running_loop()
        self._ident = threading.get_ident()
        self._schedstat: int | None = None
        with contextlib.suppress(OSError):  # Not every kernel counts what a thread waits for a processor.
            self._schedstat = os.open(f"/proc/self/task/{threading.get_native_id()}/schedstat", os.O_RDONLY)
        self._arm(self._waited())
        self._woken_s = clock.monotonic()
        self._thread.start()

    def forget(self) -> None:
        """Forget the longest stall, and measure from now on."""
        self.longest_s = 0.0
        self._on_longest(0.0)
        if self._timer is not None:
            self._timer.cancel()
            self._arm(self._waited())

    def close(self) -> None:
        """End. Idempotent."""
        self._stop.set()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._thread.join()
            if self._schedstat is not None:
                os.close(self._schedstat)

    def _arm(self, waited_s: float) -> None:
        self._waited_s, self._busy_s, self._wakes_before = waited_s, time.process_time(), self._wakes
        self._armed_s = clock.monotonic()
        self._timer = self._loop.call_later(_TICK_S, self._tick)

    def _tick(self) -> None:
        late_s, waited_s = clock.monotonic() - self._armed_s - _TICK_S, self._waited()
        stall_s = late_s - (waited_s - self._waited_s)
        if stall_s > self.longest_s and not self._was_stopped(late_s):
            self.longest_s = stall_s
            self._on_longest(stall_s)
        if self._reported:
            self._reported = False
            log.warning("the event loop goes on after %.1f s", late_s)
        self._arm(waited_s)

    def _was_stopped(self, late_s: float) -> bool:
        """Return True if the whole process stood still: no other thread woke up, no processor was used."""
        idle = time.process_time() - self._busy_s < 0.5 * late_s
        return idle and late_s > 2 * _WATCH_S and (self._wakes - self._wakes_before) * _WATCH_S < 0.5 * late_s

    def _waited(self) -> float:
        """Return the seconds that the loop's thread has waited for a processor since its start; 0 if not counted."""
        if self._schedstat is None:
            return 0.0
        fields = os.pread(self._schedstat, 64, 0).split()  # proc(5): on a processor, waiting for one, in nanoseconds
        return int(fields[1]) / 1e9 if len(fields) > 1 else 0.0

    def _watch(self) -> None:
        """Watch in the thread. A call that holds the interpreter's lock is seen when it ends, still with its place."""
        while not self._stop.wait(_WATCH_S):
            self._look()

    def _look(self) -> None:
        before_s, self._woken_s = self._woken_s, clock.monotonic()
        self._wakes += 1
        still_s = self._woken_s - self._armed_s - _TICK_S
        if still_s < self._report_s or self._reported:
            return
        if self._woken_s - before_s > self._report_s and self._was_stopped(still_s):
            return
        self._reported = True
        frame = sys._current_frames().get(self._ident)
        stack = "".join(traceback.format_stack(frame)).rstrip() if frame else "(its thread is gone)"
        log.warning("the event loop has stood still for %.1f s, in:\n%s", still_s, stack)
