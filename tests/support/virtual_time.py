"""An event loop in virtual time: where nothing is ready, its clock jumps to the next timer.

    loop = VirtualLoop(); with as_clock(loop): loop.run_until_complete(main())

Owns: time. Sixty seconds take as long as what happens in them takes to compute, and no machine is too busy for that.
What threads are given runs in the loop at once and takes no time. Descriptors are real: what is ready comes before any
jump, in the order of their numbers, so that a socket pair whose both ends are in the loop says the same every time.
"""

from __future__ import annotations

import asyncio
import contextlib
import selectors
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from app import clock

BEGINS_S = 1000.0
"""Not 0: there are fields in which 0 is "not yet"."""
_STUCK_S = 5.0
_PATIENCE_S = 0.02


class StuckError(Exception):
    """Nothing is ready, no timer runs, and nothing came from outside: what is awaited never comes."""


class _Jumping(selectors.DefaultSelector):
    """Wait for no timer, and say how long it would have been."""

    jumped: Callable[[float], None]
    patience_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Return what is ready; where nothing is, jump to the next timer."""
        ready = super().select(0)
        if not ready and timeout and self.patience_s:
            ready = super().select(self.patience_s)
        if ready or timeout is None:
            if not ready and not (ready := super().select(_STUCK_S)):
                raise StuckError("nothing is ready, and no timer runs")
            return sorted(ready, key=lambda each: each[0].fd)
        self.jumped(timeout)
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """Run callbacks as asyncio's own loop does, without waiting for their times."""

    def __init__(self, begins_s: float = BEGINS_S) -> None:
        self._jumping = selector = _Jumping()
        selector.jumped = self.stand_still
        super().__init__(selector)
        self._clock_resolution = 1e-9
        self._now_s = begins_s

    def time(self) -> float:
        """Return virtual seconds."""
        return self._now_s

    def hear_the_network(self) -> None:
        """Look for so much real time before each jump: what is sent through the network may take a moment to come."""
        self._jumping.patience_s = _PATIENCE_S

    def stand_still(self, seconds: float) -> None:
        """Let so much time pass in which nothing runs: as if the process were stopped."""
        self._now_s += max(0.0, seconds)

    def run_in_executor(self, executor: Any, function: Callable[..., Any], *given: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        """Run it here, at once: no thread says when it is done."""
        done = self.create_future()
        try:
            done.set_result(function(*given))
        except BaseException as error:
            done.set_exception(error)
        return done


@contextlib.contextmanager
def as_clock(loop: asyncio.AbstractEventLoop) -> Iterator[None]:
    """Put the loop's clock in the place of the app's as long as the context lasts."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(clock, "monotonic", loop.time)
        yield
