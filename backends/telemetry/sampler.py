"""The last known telemetry of each device, refreshed away from the request path.

Owns: one thread, the last sample, the energy counted so far. Must not know any vendor.
"""

from __future__ import annotations

import inspect
import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from math import isfinite, nan

from backends.contract.backend import Telemetry
from backends.telemetry.tool import Tool

log = logging.getLogger(__name__)

_CLOSE_LIMIT_S = 5.0
_MOST_WATTS = 1e6  # More is a tool's mistake


class Energy:
    """Energy from power: the trapezium between two known samples. It never falls, and bridges no gap."""

    def __init__(self) -> None:
        self._joules = nan
        self._last: tuple[float, float] | None = None

    def add(self, now_s: float, watts: float) -> float:
        """Add a sample; return the joules since the first known power, NaN before it."""
        if not 0 <= watts <= _MOST_WATTS:  # NaN too
            self._last = None
            return self._joules
        if self._last is None:
            self._joules = self._joules if isfinite(self._joules) else 0.0
        else:
            then_s, then_watts = self._last
            self._joules += max(0.0, now_s - then_s) * (then_watts + watts) / 2
        self._last = (now_s, watts)
        return self._joules


class Sampler:
    """Sampler that calls `read` every `interval_s` in its own thread, which the first `latest` starts.

    `read(tool)` -> Telemetry by device index; as `wanted` it may take the devices that callers have asked for. It may
    raise: then all but the energy is unknown until it succeeds again, and the log says so once. Without an energy
    counter, energy is integrated from power over `clock` (seconds). `close` closes the tool, which ends a running
    `read` soon.
    """

    def __init__(
        self,
        read: Callable[..., Mapping[int, Telemetry]],
        tool: Tool,
        interval_s: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._asked: set[int] = set()
        self._read, self._tool = read, tool
        self._takes_wanted = "wanted" in inspect.signature(read).parameters
        self._interval_s = interval_s
        self._clock = clock
        self._samples: Mapping[int, Telemetry] = {}
        self._energy: dict[int, Energy] = {}
        self._counters: set[int] = set()  # Devices that count their energy themselves: it is never integrated
        self._failing = False
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def latest(self, index: int) -> Telemetry:
        """Return a device's last sample, at once; NaN before the first, and for an unknown device."""
        self._asked.add(index)
        if self._thread is None:
            self._start()
        return self._samples.get(index, Telemetry())

    def sample(self) -> None:
        """Read once, now, in this thread. Cannot raise. The thread does this; tests may."""
        try:
            wanted = {"wanted": tuple(self._asked)} if self._takes_wanted else {}
            read = dict(self._read(self._tool, **wanted))
            self._failing = False
        except Exception as error:  # A vendor's library may raise anything
            if not self._failing and not self._stop.is_set():
                log.warning("no telemetry until this is mended: %s", error)
            self._failing = True
            read = {}
        now_s = self._clock()
        samples = {}
        self._counters |= {index for index, given in read.items() if isfinite(given.energy_joules)}
        for index in {*read, *self._energy}:
            given = read.get(index, Telemetry())
            joules = self._energy.setdefault(index, Energy()).add(now_s, given.power_watts)
            samples[index] = given if index in self._counters else replace(given, energy_joules=joules)
        self._samples = samples

    def close(self) -> None:
        """End the thread, and cancel its read. Idempotent; the last sample stays."""
        self._stop.set()
        self._tool.close()
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join(_CLOSE_LIMIT_S)

    def _start(self) -> None:
        with self._lock:
            if self._thread is None and not self._stop.is_set():
                self._thread = threading.Thread(target=self._run, name="telemetry", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        self.sample()
        while not self._stop.wait(self._interval_s):
            self.sample()
