"""A worker's memory: when it is released, and how far; levels, releases, and the reports on them.

A query that fails ends nothing: the last memory level stays, and telemetry is empty.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import pairwise
from math import isfinite
from typing import TypeVar, cast

import psutil
from msgspec.structs import replace

from app.worker.messages import (
    CACHE,
    COLLECT,
    DEVICE_RATIO,
    HAND_OVER,
    FromWorker,
    HandOver,
    Policy,
    Released,
    Stats,
    Trigger,
)
from backends import (
    Backend,
    BackendError,
    DeviceLostError,
    Memory,
    Telemetry,
    fallback_counts,
    run_release_hooks,
)

T = TypeVar("T")

log = logging.getLogger("anychip.worker")

_LOW_RATIO = 0.8
"""Share of its mark below which a trigger that has passed it is satisfied."""
_LOOK_SHARE = 0.01
"""Share of a worker's time that looking may take."""
_RELEASE_SHARE = 0.05
"""Share of a worker's time that releases may take that do not help."""
_SLOPES = 3
"""Times in a row that the level after a release has to have grown with the batches for a leak."""
_SUSPECT_SHARE = 0.05
"""Growth, as a share of the mark, after which another release tells whether a suspected leak goes on."""


@dataclass(frozen=True, slots=True)
class Step:
    """The release level to apply now, and why."""

    release: int
    trigger: Trigger


class Guard:
    """Decider of one worker's releases: pure logic. Times are seconds of one monotonic clock.

        after a batch ─► due ─► look ─► Step(1) ─► released ─► Step(2) ─► released ─► Step(3) ─► the server hands over
                                     └─ nothing to do ◄── low enough again ──┘

    It goes only as far as needed. The third step is for leaks only. A leak is a slope: the level after a release has
    grown with the batches over each of the last releases, and would be low enough without that growth. A plateau is
    no leak, however high: another process has taken its share, and a new worker would find the same.
    """

    device_ratio, cache_ratio = DEVICE_RATIO, 0.25
    """Shares of the device: in use, and reserved but not allocated."""
    resident_bytes = 2 << 30
    """Host memory that the worker may gain."""
    leak_bytes_per_batch = 1024
    """Growth after releases from which a worker leaks."""
    budget_s, cooldown_s = 0.1, 5.0
    """Time between two batches after which no further release level begins, and least time between two releases."""

    def __init__(self, policy: Policy, start: Stats, now_s: float, *, shared: bool) -> None:
        """Begin at `start`, the level after warm-up. `shared`: the device's memory is the host's; others add to it."""
        self._policy = policy
        if isinstance(policy, float):
            self.device_ratio = policy
        self._start = start
        self._shared = shared
        self._batches = 0
        self._released_batches = 0
        self._look_s = now_s
        self._climb_s = now_s  # No climb begins before this time.
        self._pending: Step | None = None
        self._spent_s = 0.0  # In the current climb.
        self._gap_s = 0.0  # The part of it since the last batch.
        self._futile: dict[Trigger, int] = {}  # Triggers that a climb could not lower, with the level left.
        self._left: dict[Trigger, list[tuple[int, int]]] = {}  # Batches so far, and the level after a release then.

    def after_batch(self) -> None:
        """Count a batch that is done."""
        self._batches += 1
        self._gap_s = 0.0

    def due(self, now_s: float) -> bool:
        """Return True if memory is to be measured now."""
        return self._policy != "off" and now_s >= self._look_s

    def look(self, level: Stats, now_s: float, cost_s: float) -> Step | None:
        """Return the step to take at this level. `cost_s`: the cost of measuring; the dearer, the rarer."""
        self._look_s = now_s + cost_s / _LOOK_SHARE
        if level.used < self._start.used:  # The worker before this one was still there at the start.
            self._start = replace(self._start, used=level.used)
        if self._pending is not None:  # A climb that ran out of time goes on if there is still need.
            step, self._pending = self._pending, None
            if self._needed(step.trigger, level):
                return step
            self._end(step.trigger, level, now_s)
            return None
        for trigger in list(self._futile):
            if self._value(trigger, level) < self._low(trigger, level):
                del self._futile[trigger]
                self._left.pop(trigger, None)
        if now_s < self._climb_s:
            return None
        pressing = self._pressing(level)
        return None if pressing is None else Step(COLLECT, pressing)

    def released(self, step: Step, level: Stats, now_s: float, cost_s: float) -> Step | None:
        """Return the release level that follows one that took `cost_s` and left `level`; None for now."""
        self._spent_s += cost_s
        self._gap_s += cost_s
        if not self._needed(step.trigger, level):
            self._end(step.trigger, level, now_s)
            return None
        if step.release == COLLECT:
            following = Step(CACHE, step.trigger)
        elif step.release == CACHE and self._leaks(step.trigger, level):
            following = Step(HAND_OVER, step.trigger)
        else:
            self._end(step.trigger, level, now_s)
            return None
        # Asking for a hand-over costs nothing.
        if following.release != HAND_OVER and self._gap_s >= self.budget_s:
            self._pending = following
            self._look_s = now_s
            return None
        if following.release == HAND_OVER:
            self._end(step.trigger, level, now_s)
        return following

    def held(self, more_bytes: int) -> None:
        """Count a model that was loaded (negative: unloaded) as no leak, then or since."""
        start, host = self._start, more_bytes if self._shared else 0
        self._start = replace(
            start,
            allocated=start.allocated + more_bytes,
            used=start.used + more_bytes,
            resident=start.resident + host,
        )
        for trigger, more in (("device", more_bytes), ("resident", host)):
            left = self._left.get(cast(Trigger, trigger))
            if left:
                left[:] = [(batches, level + more) for batches, level in left]

    def exhausted(self, level: Stats) -> bool:
        """Return True if a leak is to blame that the smallest batch found no memory; `level` is after all releases.

        A slope takes too long here: batches may end faster than looking is allowed. Between batches a process holds
        what it has loaded; what it has allocated beyond that has leaked, and no other process can be meant.
        """
        leaked = level.allocated - self._start.allocated
        if self._policy == "off" or self._shared or leaked < self._batches * self.leak_bytes_per_batch:
            return False
        return leaked > 0 and level.used - leaked < self._low("device", level)

    def _end(self, trigger: Trigger, level: Stats, now_s: float) -> None:
        # A climb that helped is worth its time: without it memory runs out, which takes longer.
        helped = not self._needed(trigger, level)
        wait_s = 0.0 if helped else self._spent_s / _RELEASE_SHARE
        self._climb_s = now_s + max(self.cooldown_s, wait_s)
        self._spent_s = self._gap_s = 0.0
        self._released_batches = self._batches
        if trigger != "batches" and self._needed(trigger, level):
            self._futile[trigger] = self._value(trigger, level)
        else:
            self._left.pop(trigger, None)
            self._futile.pop(trigger, None)

    def _pressing(self, level: Stats) -> Trigger | None:
        triggers: tuple[Trigger, ...] = ("device", "resident", "cache")
        for trigger in triggers:
            value, mark = self._value(trigger, level), self._mark(trigger, level)
            if trigger in self._futile:  # Again only after it has grown.
                mark = max(mark, self._futile[trigger] + self._step(trigger, level))
            if value > mark:
                return trigger
        every = self._policy
        return "batches" if isinstance(every, int) and self._batches - self._released_batches >= every else None

    def _needed(self, trigger: Trigger, level: Stats) -> bool:
        return trigger == "batches" or self._value(trigger, level) >= self._low(trigger, level)

    def _leaks(self, trigger: Trigger, level: Stats) -> bool:
        """Return True after a release if its level grows with the batches, and would be low enough without growth."""
        if trigger not in ("device", "resident") or (trigger == "device" and self._shared):
            return False
        left = self._left.setdefault(trigger, [(0, self._value(trigger, self._start))])
        value = self._value(trigger, level)
        if self._batches == left[-1][0]:  # A second release without a batch between tells nothing.
            left.pop()
        left.append((self._batches, value))
        del left[: -_SLOPES - 1]
        if len(left) <= _SLOPES:
            return False
        # The smallest growth a batch: a jump, such as another process's new share, does not repeat.
        slope = min((after[1] - before[1]) / (after[0] - before[0]) for before, after in pairwise(left))
        leaked = slope * self._batches
        return slope >= max(1, self.leak_bytes_per_batch) and value - leaked < self._low(trigger, level)

    def _step(self, trigger: Trigger, level: Stats) -> int:
        """Return how much a level that a release could not lower has to grow before the next release."""
        mark = self._mark(trigger, level)
        # As much as it should have fallen; less is enough to see whether the level goes on growing with the batches.
        may_leak = len(self._left.get(trigger, ())) > 1
        return int(_SUSPECT_SHARE * mark) if may_leak else mark - self._low(trigger, level)

    def _value(self, trigger: Trigger, level: Stats) -> int:
        if trigger == "device":
            return level.used
        if trigger == "cache":
            return max(0, level.reserved - level.allocated)
        return level.resident - self._start.resident

    def _mark(self, trigger: Trigger, level: Stats) -> int:
        if trigger == "resident":
            return self.resident_bytes
        ratio = self.device_ratio if trigger == "device" else self.cache_ratio
        return int(ratio * level.total)

    def _low(self, trigger: Trigger, level: Stats) -> int:
        return int(_LOW_RATIO * self._mark(trigger, level))


def _resident() -> int:
    return int(psutil.Process().memory_info().rss)


class MemoryWatch:
    """The memory of one worker on one device; made after everything is loaded and warm."""

    def __init__(self, backend: Backend, device: str, policy: Policy) -> None:
        self.leaks = False
        """Flag that only another worker can help: the guard has asked for one, or has found a leak fill the device."""
        self._backend, self._device = backend, device
        self._memory: Memory = Memory(0, 0, 0, 0)  # The last known level.
        self._silent: set[str] = set()  # Queries whose last call failed.
        self._forced = Released("out_of_memory", {}, {})  # By releases that a batch forced since the last answer.
        self.guard = Guard(policy, self._level(), time.monotonic(), shared=backend.facts.host_memory)

    def after_batch(self, send: Callable[[FromWorker], None]) -> None:
        """Look at the memory after a batch's answer was sent, and do what the guard says. Raises DeviceLostError."""
        self.guard.after_batch()
        if self._forced.returned:
            send(self._forced)
            self._forced = Released("out_of_memory", {}, {})
        started_s = time.monotonic()
        if not self.guard.due(started_s):
            return
        level = self._level()
        now_s = time.monotonic()
        step = self.guard.look(level, now_s, now_s - started_s)
        if step is None:
            return
        report = Released(step.trigger, {}, {})
        while step is not None and step.release != HAND_OVER:
            started_s = time.monotonic()
            level = self._apply(step, level, report)
            now_s = time.monotonic()
            step = self.guard.released(step, level, now_s, now_s - started_s)
        if report.returned:
            send(report)
        if step is not None:
            self.leaks = True
            send(HandOver(step.trigger))

    def release(self) -> Released:
        """Apply both release levels of the guard, as an operator asks for it. Raises DeviceLostError."""
        report, level = Released("request", {}, {}), self._level()
        for release in (COLLECT, CACHE):
            level = self._apply(Step(release, "batches"), level, report)
        return report

    def make_room(self) -> bool:
        """Release the cache when memory is out. Return True if another try may do better. Raises BackendError."""
        before = _resident()
        returned = self._backend.release_cache(self._device)
        is_first = not self._forced.returned
        for by_level, more in ((self._forced.returned, returned), (self._forced.host, max(0, before - _resident()))):
            by_level[CACHE] = by_level.get(CACHE, 0) + more
        return bool(returned) and is_first

    def exhausted(self) -> bool:
        """Return True if only the worker's end helps the smallest batch to memory. Raises DeviceLostError."""
        self.leaks = self.leaks or self.guard.exhausted(self._level())
        return self.leaks

    def stats(self) -> Stats:
        """Measure memory and telemetry now. Raises DeviceLostError."""
        telemetry = asdict(self._asked("telemetry", self._backend.telemetry, Telemetry()))
        known = {name: figure for name, figure in telemetry.items() if isfinite(figure)}
        return replace(self._level(), telemetry=known, fallbacks=dict(fallback_counts()))

    def _apply(self, step: Step, before: Stats, report: Released) -> Stats:
        """Apply a release level, and report what it returned; return the level left. Raises DeviceLostError."""
        counted = 0
        try:
            if step.release == COLLECT:
                gc.collect()
            else:
                counted = self._backend.release_cache(self._device)
                counted += run_release_hooks(self._backend.name, self._device)
        except DeviceLostError:
            raise
        except BackendError:
            log.exception("release level %d of the memory guard failed", step.release)
        level = self._level()
        device = max(0, before.used - level.used) if step.release == COLLECT else counted
        report.returned[step.release], report.host[step.release] = device, max(0, before.resident - level.resident)
        log.debug("release level %d for %s returned %d bytes of the device", step.release, step.trigger, device)
        return level

    def _level(self) -> Stats:
        self._memory = memory = self._asked("memory", self._backend.memory, self._memory)
        return Stats(memory.allocated, memory.reserved, memory.used, memory.total, _resident())

    def _asked(self, what: str, query: Callable[[str], T], otherwise: T) -> T:
        """Return the device's answer, or `otherwise` if its query fails. Raises DeviceLostError."""
        try:
            answer = query(self._device)
        except DeviceLostError:
            raise
        except Exception as error:  # Vendors' queries fail in their own ways.
            if what not in self._silent:  # Once, not every second.
                self._silent.add(what)
                log.warning("%s does not say its %s: %s", self._device, what, error)
            return otherwise
        if what in self._silent:
            self._silent.discard(what)
            log.info("%s answers about its %s again", self._device, what)
        return answer
