"""`anychip top` ends with q, also in the middle of a wait; where no terminal is, it only waits."""

from __future__ import annotations

import os
import pty
import termios
from collections.abc import Iterator

import pytest

from anychip_tools import top


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[int, int]]:
    """Yield both ends of a terminal; the second is this process's standard input."""
    ours, theirs = pty.openpty()
    with os.fdopen(theirs) as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        yield ours, theirs
    os.close(ours)


def test_q_ends_a_wait_and_other_keys_do_not(terminal: tuple[int, int]) -> None:
    ours, theirs = terminal
    before = termios.tcgetattr(theirs)
    with top._keys() as ended:
        assert not ended(0.0)
        os.write(ours, b"xy")
        assert not ended(0.01)
        os.write(ours, b"xq")
        assert ended(3600.0)
        assert termios.tcgetattr(theirs)[3] & termios.ICANON == 0
    assert termios.tcgetattr(theirs) == before


def test_without_a_terminal_nothing_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    os.write(writing, b"q")
    with os.fdopen(reading) as stdin, os.fdopen(writing, "w"):
        monkeypatch.setattr("sys.stdin", stdin)
        with top._keys() as ended:
            assert not ended(0.0)
        assert os.read(reading, 1) == b"q"
