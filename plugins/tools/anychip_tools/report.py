"""Output of commands: bars, tables, Markdown, JSON, and the environment of a measurement."""

from __future__ import annotations

import json
import math
import os
import platform
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from anychip_base.extras import version_of
from app.telling import say

Cell = str | int | float | None
"""Cell of a table. Fractions are shown to three digits, None as nothing."""


_LOOKS_EVERY_S = 0.2
"""Seconds between two looks at how far the bars are."""


@contextmanager
def progress(*, quiet: bool = False) -> Iterator[Progress]:
    """Show bars on stderr during long work, where stderr is no terminal a line every 4 s; nothing if `quiet` is set."""
    shown = Console(stderr=True, markup=False)
    columns = TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    silent = quiet or shown.is_terminal
    ended = threading.Event()
    with Progress(*columns, TimeElapsedColumn(), console=shown, transient=True, disable=quiet or not silent) as bars:

        def look() -> None:
            while not silent and not ended.wait(_LOOKS_EVERY_S):
                say("; ".join(map(_how_far, bars.tasks)))

        looking = threading.Thread(target=look, name="progress", daemon=True)
        looking.start()
        try:
            yield bars
        finally:
            ended.set()
            looking.join()


def _how_far(task: Task) -> str:
    of = f" of {task.total:.0f}" if task.total else ""
    return f"{task.description}: {task.completed:.0f}{of} done"


def in_json(document: Any) -> str:
    """Format JSON for people. NaN and infinity, which JSON does not know, become null."""
    return json.dumps(plain(document), indent=2)


def plain(value: Any) -> Any:
    """Convert mappings, sequences and numbers to the types that JSON knows."""
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(each) for each in (sorted(value) if isinstance(value, set | frozenset) else value)]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return str(value) if isinstance(value, Path) else value


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> Table:
    """Make a table for the terminal, without its empty columns; columns of numbers are set to the right."""
    places = [place for place in range(len(columns)) if not rows or any(text_of(row[place]) for row in rows)]
    columns, rows = [columns[place] for place in places], [[row[place] for place in places] for row in rows]
    made = Table(title=title, title_justify="left", box=None, pad_edge=False, title_style="bold")
    for number, column in enumerate(columns):
        numeric = any(isinstance(row[number], int | float) for row in rows)
        made.add_column(column, justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        made.add_row(*map(text_of, row))
    return made


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    """Make a table in Markdown."""
    lines = [columns, ["---"] * len(columns), *([text_of(cell) for cell in row] for row in rows)]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines) + "\n"


def text_of(cell: Cell) -> str:
    """Format a cell for people."""
    if cell is None or (isinstance(cell, float) and math.isnan(cell)):
        return ""
    if isinstance(cell, float):
        return f"{cell:.0f}" if abs(cell) >= 1000 else f"{cell:.3g}"
    return str(cell)


def console() -> Console:
    """Return a console for tables on stdout. Output that is no terminal gets long lines, for programs to read.

    Text is shown as it is: paths and messages have brackets and colons, which rich takes for markup and emoji.
    """
    width = None if sys.stdout.isatty() else 200
    return Console(width=width, soft_wrap=False, highlight=False, markup=False, emoji=False)


def show_or_print(document: dict[str, Any], show: Callable[[dict[str, Any]], None], *, as_json: bool) -> None:
    """Print a command's findings, as JSON for a program or as tables."""
    print(in_json(document)) if as_json else show(document)


def versions(*packages: str) -> dict[str, str]:
    """Return the versions of these packages and the vendors' packages that are installed. Imports torch."""
    import torch

    from backends import BACKENDS
    from backends.vendors.table import software

    every = (*packages, *software(backend.facts for backend in BACKENDS))
    found = {package: version for package in every if (version := version_of(package))}
    return {**found, "torch": str(torch.__version__)}  # With the tag of its build.


def environment(device: str = "", device_name: str = "") -> dict[str, str | int]:
    """Return what a measurement depends on: versions, processor, device, date. Imports torch."""
    from backends import host

    return {
        "date": time.strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "processor": host.cpu_name(),
        "cores": host.core_count(),
        "load_average": f"{os.getloadavg()[0]:.1f}",
        "device": device,
        "device_name": device_name,
        **versions("anychip"),
    }
