"""Files of a model, whose folder may be a stranger's: plain files only, none from elsewhere, bounded YAML, digests.

    name in a folder ─► where it leads ─► a descriptor ─► is it a plain file, and the one that was meant?
    events of YAML's parser, one by one: how deep, how many, what aliases stand for ─► the document

The checks are of the descriptor that is then read, so that an exchange in between changes nothing. A link may lead to
another file of the folder, or to the cache of Hugging Face for it: `snapshots/REVISION/name` or a name in a folder
there is a link to `blobs/HASH` there. Must not know what is in a file.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import stat
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from models.contract.errors import WeightsError

MAX_TEXT_BYTES = 16 << 20
"""Largest size of a file that describes: labels, configurations, sidecars."""
_TEXT = (".txt", ".json", ".yaml", ".yml")
_MAX_BYTES = 256 << 30
MAX_DEPTH = 20
MAX_ENTRIES = 200_000
"""Largest number of entries, aliases expanded. A network that reads text lists characters; PP-OCRv5 has 18,000."""
_MAX_SCALAR = 4096
"""Characters of a scalar: the time that YAML's numbers to the base of 60 take grows with the square of their length."""
CUT_SHORT = "is cut short: copy it again"
_NO_FILE = {  # What is saved in place of a file, by its first bytes.
    b"version https://git-lfs.github.com/spec/": "a pointer of Git LFS: `git lfs pull` brings the file",
    **dict.fromkeys((b"<!DOCTYPE html", b"<!doctype html", b"<html"), "a page of a site: download the file itself"),
}


def begins_as_archive(file: Path) -> bool:
    """Return True if a file begins as a zip archive, as torch saves; it may lack the end. Raises OSError."""
    with file.open("rb") as opened:
        return opened.read(4) == b"PK\x03\x04"


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


def read_yaml(content: bytes, *, texts: bool = False, aliases: bool = False) -> Any:
    """Read the document. `texts`: all scalars are texts, e.g. the characters `1` or `true`; `aliases`: allowed.

    Raises ValueError, with a sentence, for a text that is no YAML, or is deeper or longer than such a file ever is.
    """
    import yaml

    fast = getattr(yaml, "CBaseLoader" if texts else "CSafeLoader", None)
    loader = fast or (yaml.BaseLoader if texts else yaml.SafeLoader)
    try:
        _check_events(yaml.parse(content, loader), yaml, aliases)
        return yaml.load(content, loader)
    # Its constructors raise anything on a value that is not of the type that the text states.
    except (yaml.YAMLError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
        raise ValueError(" ".join(str(error).split())[:200] or "it is no YAML") from error


def _check_events(events: Iterable[Any], yaml: Any, aliases: bool) -> None:
    known: dict[str, tuple[int, int]] = {}  # For each anchor: its number of entries, and its depth.
    open_ones: list[tuple[str | None, int, int]] = [(None, 0, 0)]
    for event in events:
        entries, depth = 1, 0
        if isinstance(event, yaml.AliasEvent):
            if not aliases:
                raise ValueError("it has aliases")
            if event.anchor not in known:
                raise ValueError(f"what {str(event.anchor)[:50]} stands for is not known, or holds itself")
            entries, depth = known[event.anchor]
        elif isinstance(event, yaml.CollectionStartEvent):
            known.pop(event.anchor, None)
            open_ones.append((event.anchor, 0, 0))
            if len(open_ones) > MAX_DEPTH:
                raise ValueError(f"it is deeper than {MAX_DEPTH} levels")
            continue
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, within, height = open_ones.pop()
            entries, depth = within + 1, height + 1
            if anchor is not None:
                known[anchor] = entries, depth
        elif isinstance(event, yaml.ScalarEvent):
            if len(event.value) > _MAX_SCALAR:
                raise ValueError(f"it has an entry of more than {_MAX_SCALAR} characters")
            if event.anchor is not None:
                known[event.anchor] = 1, 0
        else:
            continue
        anchor, within, height = open_ones.pop()
        open_ones.append((anchor, within + entries, max(height, depth)))
        if within + entries > MAX_ENTRIES:
            raise ValueError(f"it has more than {MAX_ENTRIES} entries")
        if len(open_ones) + depth > MAX_DEPTH:
            raise ValueError(f"it is deeper than {MAX_DEPTH} levels")


def sha256_of(path: Path, folder: Path | None = None) -> str:
    """Return the SHA-256 in hexadecimal. `folder`: the file must lie in it, by default its own. Raises WeightsError."""
    try:
        with open(open_regular(path, folder), "rb", buffering=0) as file:
            digest, chunk = hashlib.sha256(), bytearray(1 << 20)
            while count := file.readinto(chunk):
                for start, what in _NO_FILE.items():
                    if chunk.startswith(start):
                        raise WeightsError(f"{path.name} is {what}.")
                digest.update(memoryview(chunk)[:count])
            return digest.hexdigest()
    except OSError as error:
        raise WeightsError(f"{path.name} cannot be read: {error.strerror}.") from None


def digest_of_all(digests: Iterable[tuple[str, str]]) -> str:
    """Compute one digest from names and digests of files. A single file keeps its own; several have the digest of
    `sha256sum`'s output for them, in the order of their names.
    """
    ordered = sorted(digests)
    return ordered[0][1] if len(ordered) == 1 else hashlib.sha256(listed(ordered).encode()).hexdigest()


def listed(digests: Iterable[tuple[str, str]]) -> str:
    """Format names and digests of files as `sha256sum` does, in the order of their names."""
    return "".join(f"{digest}  {name}\n" for name, digest in sorted(digests))


@cache
def digest_of_sources(package: str) -> str:
    """Hash all Python sources of a package by name, without importing it: another release may compute otherwise."""
    spec, digest = find_spec(package), hashlib.sha256()
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        for file in sorted(Path(folder).rglob("*.py")):
            digest.update(file.read_bytes())
    return digest.hexdigest()


@dataclass(frozen=True)
class OpenedFiles:
    """All files of a model, as they were when it was opened.

    `folder`: they are read from it; `main`: the name of the named file; `digests`: the name and the SHA-256 of each
    file, names within the folder; `source`: the main file's original path; `is_copy`: whether the folder is ours.
    """

    folder: str
    main: str
    digests: tuple[tuple[str, str], ...]
    source: str
    is_copy: bool = False

    @property
    def file(self) -> Path:
        """The main file."""
        return Path(self.folder, self.main)

    @property
    def paths(self) -> list[Path]:
        """Every file, after links are followed. Raises WeightsError for one that leads out of the folder."""
        folder = Path(self.folder)
        return [place_of(folder / name, folder) for name, _ in self.digests]

    @property
    def sha256(self) -> str:
        """One digest of all files (`digest_of_all`)."""
        return digest_of_all(self.digests)

    def check(self) -> None:
        """Compare all files with their digests. Raises WeightsError if one has changed or is missing."""
        for name, wanted in self.digests:
            found = sha256_of(Path(self.folder, name), Path(self.folder))
            if found != wanted:
                raise WeightsError(f"{Path(self.folder, name)} has changed since it was opened: load the model again.")

    def hold(self) -> bool:
        """Keep a copy from being removed as long as this object lives in this process. Return False if it is being
        removed or missing.
        """
        if not self.is_copy:
            return True
        try:
            folder = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:
            return False
        weakref.finalize(self, os.close, folder)
        try:
            fcntl.flock(folder, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:
            pass  # A file system without locks, on which nothing is removed.
        return True
