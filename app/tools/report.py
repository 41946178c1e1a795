"""How commands show what they do: a bar while it takes long, and JSON.

Owns: the forms. Must not know what is in them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


@contextmanager
def progress(*, quiet: bool = False) -> Iterator[Progress]:
    """Bars on stderr while something takes long; none where stderr is no terminal, or it should be `quiet`."""
    shown = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(
        *columns, TimeElapsedColumn(), console=shown, transient=True, disable=quiet or not shown.is_terminal
    ) as bars:
        yield bars


def print_json(document: Any) -> None:
    """JSON on stdout. NaN and infinity, which JSON does not know, become null."""
    print(json.dumps(plain(document), indent=2))


def plain(value: Any) -> Any:
    """What JSON knows, of mappings, sequences and numbers."""
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(each) for each in (sorted(value) if isinstance(value, set | frozenset) else value)]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return str(value) if isinstance(value, Path) else value
