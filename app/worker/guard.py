"""Memory guard of a worker: when it releases memory, and how far; pure logic, without torch, clocks or own devices.

    after a batch ─► due ─► look ─► Step(1) ─► released ─► Step(2) ─► released ─► Step(3) ─► the server hands over
                                 └─ nothing to do ◄── low enough again ──┘

Owns: the marks, hysteresis, cool-down and time budget. Must not measure, release or import torch: levels and times are
parameters. It climbs three rungs, only as far as needed: 1 drop references and collect, 2 the vendor's caches, 3
another worker in place of this one.

Rung 3 is for leaks only. A leak is a slope: the level after a release has grown with the batches over each of the last
releases, and would be low enough without that growth. A plateau is no leak, however high: another process has taken its
share, and a new worker would find the same.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal, cast

Policy = Literal["off", "auto"] | int
"""Release policy. A number: as auto, and a release after so many batches."""
Trigger = Literal["cache", "device", "resident", "batches"]

COLLECT, CACHE, HAND_OVER = 1, 2, 3
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
class LeakLimits:
    """Limits for the release of memory. `device_ratio`: share of the device that may be in use; `resident_bytes`: host
    memory that the worker may gain; `cache_ratio`: share of the device that may be reserved and not allocated;
    `leak_bytes_per_batch`: growth after releases from which a worker leaks; `budget_s`: time between two batches after
    which no further rung begins; `cooldown_s`: least time between two releases.
    """

    policy: Policy = "auto"
    device_ratio: float = 0.85
    resident_bytes: int = 2 << 30
    cache_ratio: float = 0.25
    leak_bytes_per_batch: int = 1024
    budget_s: float = 0.1
    cooldown_s: float = 5.0


@dataclass(frozen=True, slots=True)
class Level:
    """Bytes now: of the device as in `backends.Memory`, and the process's resident set."""

    allocated: int
    reserved: int
    used: int
    total: int
    resident: int


@dataclass(frozen=True, slots=True)
class Step:
    """The rung to climb now, and why."""

    rung: int
    trigger: Trigger


class Guard:
    """Memory guard of one worker. Times are seconds of one monotonic clock."""

    def __init__(self, limits: LeakLimits, start: Level, now_s: float, *, shared: bool) -> None:
        """Begin at `start`, the level after warm-up. `shared`: the device's memory is the host's; others add to it."""
        self._limits = limits
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
        return self._limits.policy != "off" and now_s >= self._look_s

    def look(self, level: Level, now_s: float, cost_s: float) -> Step | None:
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

    def released(self, step: Step, level: Level, now_s: float, cost_s: float) -> Step | None:
        """Return the rung that follows one that took `cost_s` and left `level`; None for now."""
        self._spent_s += cost_s
        self._gap_s += cost_s
        if not self._needed(step.trigger, level):
            self._end(step.trigger, level, now_s)
            return None
        if step.rung == COLLECT:
            following = Step(CACHE, step.trigger)
        elif step.rung == CACHE and self._leaks(step.trigger, level):
            following = Step(HAND_OVER, step.trigger)
        else:
            self._end(step.trigger, level, now_s)
            return None
        # Asking for a hand-over costs nothing.
        if following.rung != HAND_OVER and self._gap_s >= self._limits.budget_s:
            self._pending = following
            self._look_s = now_s
            return None
        if following.rung == HAND_OVER:
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

    def exhausted(self, level: Level) -> bool:
        """Return True if a leak is to blame that the smallest batch found no memory; `level` is after all releases.

        A slope takes too long here: batches may end faster than looking is allowed. Between batches a process holds
        what it has loaded; what it has allocated beyond that has leaked, and no other process can be meant.
        """
        leaked = level.allocated - self._start.allocated
        if self._limits.policy == "off" or self._shared or leaked < self._batches * self._limits.leak_bytes_per_batch:
            return False
        return leaked > 0 and level.used - leaked < self._low("device", level)

    def _end(self, trigger: Trigger, level: Level, now_s: float) -> None:
        # A climb that helped is worth its time: without it memory runs out, which takes longer.
        helped = not self._needed(trigger, level)
        wait_s = 0.0 if helped else self._spent_s / _RELEASE_SHARE
        self._climb_s = now_s + max(self._limits.cooldown_s, wait_s)
        self._spent_s = self._gap_s = 0.0
        self._released_batches = self._batches
        if trigger != "batches" and self._needed(trigger, level):
            self._futile[trigger] = self._value(trigger, level)
        else:
            self._left.pop(trigger, None)
            self._futile.pop(trigger, None)

    def _pressing(self, level: Level) -> Trigger | None:
        triggers: tuple[Trigger, ...] = ("device", "resident", "cache")
        for trigger in triggers:
            value, mark = self._value(trigger, level), self._mark(trigger, level)
            if trigger in self._futile:  # Again only after it has grown.
                mark = max(mark, self._futile[trigger] + self._step(trigger, level))
            if value > mark:
                return trigger
        every = self._limits.policy
        return "batches" if isinstance(every, int) and self._batches - self._released_batches >= every else None

    def _needed(self, trigger: Trigger, level: Level) -> bool:
        return trigger == "batches" or self._value(trigger, level) >= self._low(trigger, level)

    def _leaks(self, trigger: Trigger, level: Level) -> bool:
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
        return slope >= max(1, self._limits.leak_bytes_per_batch) and value - leaked < self._low(trigger, level)

    def _may_leak(self, trigger: Trigger) -> bool:
        """Return True if it looks like a leak so far: the level has grown with the batches since the last release."""
        return len(self._left.get(trigger, ())) > 1

    def _step(self, trigger: Trigger, level: Level) -> int:
        """Return how much a level that a release could not lower has to grow before the next release."""
        mark = self._mark(trigger, level)
        # As much as it should have fallen; less is enough to see whether it is a leak.
        return int(_SUSPECT_SHARE * mark) if self._may_leak(trigger) else mark - self._low(trigger, level)

    def _value(self, trigger: Trigger, level: Level) -> int:
        if trigger == "device":
            return level.used
        if trigger == "cache":
            return max(0, level.reserved - level.allocated)
        return level.resident - self._start.resident

    def _mark(self, trigger: Trigger, level: Level) -> int:
        if trigger == "resident":
            return self._limits.resident_bytes
        ratio = self._limits.device_ratio if trigger == "device" else self._limits.cache_ratio
        return int(ratio * level.total)

    def _low(self, trigger: Trigger, level: Level) -> int:
        return int(_LOW_RATIO * self._mark(trigger, level))
