"""Stamp of a file: a tuple that differs once the file has changed.

Owns: that tuple. Must not know what is in the file.
"""

from __future__ import annotations

from pathlib import Path


def stamp(path: Path) -> tuple[int, ...]:
    """Return the stamp of a link's target, as Kubernetes changes that; empty if nothing is there."""
    try:
        found = path.stat()
    except OSError:
        return ()
    return found.st_ino, found.st_dev, found.st_mtime_ns, found.st_size
