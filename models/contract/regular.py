"""Opening of a model's files, whose folder may be a stranger's: plain files only, none from elsewhere.

    name in a folder ─► where it leads ─► a descriptor ─► is it a plain file, and the one that was meant?

Owns: these checks on the descriptor that is then read, so that an exchange in between changes nothing. Must not know
what is in a file. A link may lead to another file of the folder, or to the cache of Hugging Face for it:
`snapshots/REVISION/name` or a name in a folder there is a link to `blobs/HASH` there.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from models.contract.errors import WeightsError

MAX_TEXT_BYTES = 16 << 20
"""Largest size of a file that describes: labels, configurations, sidecars."""
_TEXT = (".txt", ".json", ".yaml", ".yml")
_MAX_BYTES = 256 << 30


def most_bytes(name: str) -> int:
    """Return the largest allowed size of a file, by its name."""
    return MAX_TEXT_BYTES if name.endswith(_TEXT) else _MAX_BYTES


def open_regular(path: Path, folder: Path | None = None) -> int:
    """Open a descriptor for reading, which the caller closes. `folder`: where the file must lie, by default its own.

    Raises WeightsError, and FileNotFoundError if nothing has that name.
    """
    place = place_of(path, folder)
    try:
        # Opening for reading would wait on a pipe, and could make a device act.
        descriptor = os.open(place, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    except FileNotFoundError:
        if path.is_symlink():
            raise WeightsError(f"{path.name} is a link to what is not there.") from None
        raise
    except OSError as error:
        raise WeightsError(f"{path.name} cannot be read: {error.strerror}.") from None
    try:
        _check(descriptor, path, place)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def place_of(path: Path, folder: Path | None = None) -> Path:
    """Follow a path's links. Raises WeightsError if they lead out of the folder."""
    base = Path(os.path.realpath(path.parent if folder is None else folder))
    place = Path(os.path.realpath(path))
    if base in place.parents:
        return place
    if any(
        each.parent.name == "snapshots" and place.parent == each.parents[1] / "blobs" for each in (base, *base.parents)
    ):
        return place
    raise WeightsError(f"{path.name} is a link out of its folder, to {place}: put the file itself there.")


def read_regular(path: Path, most: int = MAX_TEXT_BYTES) -> bytes | None:
    """Read a file's content, None if nothing has that name. `most`: its largest size in bytes. Raises WeightsError."""
    try:
        descriptor = open_regular(path)
    except FileNotFoundError:
        return None
    with open(descriptor, "rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise WeightsError(f"{path.name} is larger than {most} bytes.")
    return content


def _check(descriptor: int, path: Path, place: Path) -> None:
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise WeightsError(f"{path.name} is no plain file.")
    if status.st_size > most_bytes(path.name):
        raise WeightsError(f"{path.name} is larger than {most_bytes(path.name)} bytes.")
    # A folder on the way may have become a link since: the open descriptor tells the real path.
    try:
        where = os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:  # Another system than Linux, or a container without /proc.
        where = str(place) if os.path.samestat(status, os.stat(os.path.realpath(place))) else ""
    if where != str(place):
        raise WeightsError(f"{path.name} was exchanged while it was opened.")
