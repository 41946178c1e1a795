"""Event loop in virtual time: if nothing is ready, its clock jumps to the next timer.

    loop = VirtualLoop(); with as_clock(loop): loop.run_until_complete(main())

Owns: time. Sixty seconds take as long as their events take to compute, and no machine is too busy for that.
Work given to threads runs in the loop at once and takes no time. Descriptors are real: ready ones come before any
jump, in the order of their numbers, so that a socket pair with both ends in the loop acts the same every time.
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
"""Start of virtual time; not 0, because 0 means "not yet" in some fields."""
_STUCK_S = 5.0
_PATIENCE_S = 0.02


class _Jumping(selectors.DefaultSelector):
    """Selector that waits for no timer, and reports how long the wait would have been."""

    jumped: Callable[[float], None]
    patience_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready and timeout and self.patience_s:
            ready = super().select(self.patience_s)
        if ready or timeout is None:
            if not ready and not (ready := super().select(_STUCK_S)):
                raise RuntimeError("a deadlock: nothing is ready, no timer runs, and nothing came from outside")
            return sorted(ready, key=lambda each: each[0].fd)
        self.jumped(timeout)
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """Loop that runs callbacks like asyncio's own, without waiting for their times."""

    def __init__(self, begins_s: float = BEGINS_S) -> None:
        self._jumping = selector = _Jumping()
        selector.jumped = self.stand_still
        super().__init__(selector)
        self._clock_resolution = 1e-9
        self._now_s = begins_s

    def time(self) -> float:
        return self._now_s

    def hear_the_network(self) -> None:
        """Wait a moment of real time before each jump: network messages may take a moment to arrive."""
        self._jumping.patience_s = _PATIENCE_S

    def stand_still(self, seconds: float) -> None:
        """Let so much time pass without running anything, as if the process were stopped."""
        self._now_s += max(0.0, seconds)

    def run_in_executor(self, executor: Any, function: Callable[..., Any], *given: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        """Run the function here, at once: no thread reports its end."""
        done = self.create_future()
        try:
            done.set_result(function(*given))
        except BaseException as error:
            done.set_exception(error)
        return done


@contextlib.contextmanager
def as_clock(loop: asyncio.AbstractEventLoop) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(clock, "monotonic", loop.time)
        yield
