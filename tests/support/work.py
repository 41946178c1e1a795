"""Measures of work, instead of a clock, which also measures how fast and how busy the machine is."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any


def calls(function: Callable[[], object]) -> int:
    """Count the functions called in this thread, of Python and of C, until this one is done."""
    count = 0

    def seen(_frame: FrameType, event: str, _argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(seen)
    try:
        function()
    finally:
        sys.setprofile(before)
    return count - 1  # Without the last one, of setprofile.


def until(condition: Callable[[], object], within_s: float = 240) -> None:
    """Poll for a state that nothing else signals. Raises AssertionError if it never comes."""
    wait = threading.Event()
    for _ in range(int(within_s / 0.02)):
        if condition():
            return
        wait.wait(0.02)
    raise AssertionError("it never came about")
