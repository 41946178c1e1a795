"""A worker's memory: levels, releases, and the reports on them.

Owns: measuring, climbing the guard's rungs, statistics. The guard decides when to climb. Must not know batches, beyond
that one has ended. A query that fails ends nothing: the last memory level stays, and telemetry is empty.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable
from dataclasses import asdict
from math import isfinite
from typing import Literal, NamedTuple, TypeVar

import psutil

from app.worker.guard import CACHE, COLLECT, HAND_OVER, Guard, LeakLimits, Level, Step, Trigger
from app.worker.messages import FromWorker, HandOver, Released, Stats
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


class _Returned(NamedTuple):
    """Bytes that a release returned: of the device, as its backend and hooks say, and of the resident set."""

    device: int
    host: int


def _released(trigger: Trigger | Literal["request", "out_of_memory"], by_rung: dict[int, _Returned]) -> Released:
    device = {rung: returned.device for rung, returned in by_rung.items()}
    return Released(trigger, device, {rung: returned.host for rung, returned in by_rung.items()})


def _resident() -> int:
    """Return the bytes of this process's resident set."""
    return int(psutil.Process().memory_info().rss)


class MemoryWatch:
    """The memory of one worker on one device; made after everything is loaded and warm."""

    def __init__(self, backend: Backend, device: str, limits: LeakLimits) -> None:
        self.leaks = False
        """Flag that only another worker can help: the guard has asked for one, or has found a leak fill the device."""
        self._backend, self._device = backend, device
        self._memory: Memory = Memory(0, 0, 0, 0)  # The last known level.
        self._silent: set[str] = set()  # Queries whose last call failed.
        self._forced: list[_Returned] = []  # By releases that a batch forced since the last answer.
        self._guard = Guard(limits, self._level(), time.monotonic(), shared=backend.facts.host_memory)

    def after_batch(self, send: Callable[[FromWorker], None]) -> None:
        """Look at the memory after a batch's answer was sent, and do what the guard says. Raises DeviceLostError."""
        self._guard.after_batch()
        if self._forced:
            device, host = (sum(each) for each in zip(*self._forced, strict=True))
            send(_released("out_of_memory", {CACHE: _Returned(device, host)}))
            self._forced.clear()
        started_s = time.monotonic()
        if not self._guard.due(started_s):
            return
        level = self._level()
        now_s = time.monotonic()
        step = self._guard.look(level, now_s, now_s - started_s)
        if step is None:
            return
        trigger = step.trigger
        returned: dict[int, _Returned] = {}
        while step is not None and step.rung != HAND_OVER:
            started_s = time.monotonic()
            returned[step.rung], level = self._climb(step, level)
            now_s = time.monotonic()
            step = self._guard.released(step, level, now_s, now_s - started_s)
        if returned:
            send(_released(trigger, returned))
        if step is not None:
            self.leaks = True
            send(HandOver(trigger))

    def held(self, more_bytes: int) -> None:
        """Tell the guard of a model that was loaded and takes so much; negative: unloaded."""
        self._guard.held(more_bytes)

    def release(self) -> Released:
        """Climb both release rungs of the guard, as an operator asks for it. Raises DeviceLostError."""
        returned: dict[int, _Returned] = {}
        level = self._level()
        for rung in (COLLECT, CACHE):
            returned[rung], level = self._climb(Step(rung, "batches"), level)
        return _released("request", returned)

    def make_room(self) -> bool:
        """Release the cache when memory is out. Return True if another try may do better. Raises BackendError."""
        before = _resident()
        returned = self._backend.release_cache(self._device)
        self._forced.append(_Returned(returned, max(0, before - _resident())))
        return bool(returned) and len(self._forced) == 1

    def exhausted(self) -> bool:
        """Return True if only the worker's end helps the smallest batch to memory. Raises DeviceLostError."""
        self.leaks = self.leaks or self._guard.exhausted(self._level())
        return self.leaks

    def stats(self) -> Stats:
        """Measure memory and telemetry now. Raises DeviceLostError."""
        telemetry = asdict(self._asked("telemetry", self._backend.telemetry, Telemetry()))
        known = {name: figure for name, figure in telemetry.items() if isfinite(figure)}
        return Stats(**asdict(self._level()), telemetry=known, fallbacks=dict(fallback_counts()))

    def _climb(self, step: Step, before: Level) -> tuple[_Returned, Level]:
        """Climb a rung; return what it returned, and the level left. Raises DeviceLostError."""
        counted = 0
        try:
            if step.rung == COLLECT:
                gc.collect()
            else:
                counted = self._backend.release_cache(self._device)
                counted += run_release_hooks(self._backend.name, self._device)
        except DeviceLostError:
            raise
        except BackendError:
            log.exception("rung %d of the memory guard failed", step.rung)
        level = self._level()
        device = max(0, before.used - level.used) if step.rung == COLLECT else counted
        returned = _Returned(device, max(0, before.resident - level.resident))
        log.debug("rung %d for %s returned %d bytes, of the host %d", step.rung, step.trigger, *returned)
        return returned, level

    def _level(self) -> Level:
        self._memory = memory = self._asked("memory", self._backend.memory, self._memory)
        return Level(memory.allocated, memory.reserved, memory.used, memory.total, _resident())

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
