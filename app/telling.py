"""Lines on stderr every 4 s that say what a long command does: `opening cars, 8 s`.

Owns: the process that prints these lines. A thread would be silent exactly when they are wanted: imports, tracers and
compilers hold Python's lock for up to 20 s. Must not import more than Python's own modules: it begins before all else.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

_EVERY_S = 4.0
_PROGRAM = """
import os, select, sys, time
every_s, text = float(sys.argv[1]), ""
began_s = time.monotonic()
told_s = began_s - every_s / 4  # What Python took to begin counts, too.
while True:
    if select.select([0], [], [], max(0, told_s + every_s - time.monotonic()))[0]:
        if not (given := os.read(0, 65536)):
            break
        if (now := given.decode(errors="replace").split("\\n")[-2]) != text:
            text, began_s = now, time.monotonic()
    if time.monotonic() >= told_s + every_s:
        told_s = time.monotonic()
        if text:
            os.write(2, f"{text}, {told_s - began_s:.0f} s\\n".encode())
"""
_texts: list[str] = []
"""Steps that are under way, the innermost one last."""
_pipes: list[int] = []
"""Pipe to the process that prints, while there is one."""


@contextmanager
def telling(text: str) -> Iterator[Callable[[str], None]]:
    """Say this text until the end; yield what changes it. A step within another one is said in its place."""
    if _pipes:
        with _within(text) as say:
            yield say
        return
    command = [sys.executable, "-I", "-S", "-c", _PROGRAM, str(_EVERY_S)]
    # In a session of its own: Ctrl-C is for the command.
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True) as printing:
        assert printing.stdin is not None
        _pipes.append(printing.stdin.fileno())
        try:
            with _within(text) as say:
                yield say
        finally:
            _pipes.clear()
            printing.kill()


@contextmanager
def _within(text: str) -> Iterator[Callable[[str], None]]:
    place = len(_texts)
    _texts.append(text)

    def say(now: str) -> None:
        if _texts[place] != now:
            _texts[place] = now
            _send()

    _send()
    try:
        yield say
    finally:
        del _texts[place:]
        _send()


def _send() -> None:
    if not _texts:
        return
    text = _texts[-1].replace("\n", " ")
    if "://" in text:  # Only then, as this takes time to import.
        from models.addresses import without_secrets

        text = without_secrets(text)
    with suppress(OSError):  # Nobody prints any more.
        os.write(_pipes[0], f"{text[:1000]}\n".encode(errors="replace"))
