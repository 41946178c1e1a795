"""SHA-256 of files, as people name it for weights that must be these and no others.

Owns: computing it, the digest of several files as one, and the sentence where it is another. Must not know what is in a
file.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from models.contract.errors import WeightsError
from models.contract.regular import open_regular, place_of

_CHUNK_BYTES = 1 << 20


def sha256_of(path: Path, folder: Path | None = None) -> str:
    """In hexadecimal. `folder`: in which the file must lie, else its own. Raises WeightsError."""
    try:
        with open(open_regular(path, folder), "rb", buffering=0) as file:
            return _sha256(file)
    except OSError as error:
        raise WeightsError(f"{path.name} cannot be read: {error.strerror}.") from None


def _sha256(file: object) -> str:
    digest, chunk = hashlib.sha256(), bytearray(_CHUNK_BYTES)
    while count := file.readinto(chunk):  # type: ignore[attr-defined]
        digest.update(memoryview(chunk)[:count])
    return digest.hexdigest()


def check_sha256(path: Path, wanted: str) -> None:
    """Raises WeightsError where the file is another than was wanted."""
    found = sha256_of(path)
    if found != wanted:
        raise WeightsError(f"{path.name} has SHA-256 {found}, not {wanted} as it should.")


def digest_of_all(digests: Iterable[tuple[str, str]]) -> str:
    """One digest for names and digests of files: that of a single file is its own, that of several is the digest of
    what `sha256sum` writes of them in the order of their names.
    """
    ordered = sorted(digests)
    return ordered[0][1] if len(ordered) == 1 else hashlib.sha256(listed(ordered).encode()).hexdigest()


def listed(digests: Iterable[tuple[str, str]]) -> str:
    """Names and digests of files as `sha256sum` writes them, in the order of their names."""
    return "".join(f"{digest}  {name}\n" for name, digest in sorted(digests))


@cache
def digest_of_sources(package: str) -> str:
    """Of all Python sources of a package by name, which is not imported: another release may compute otherwise."""
    spec, digest = find_spec(package), hashlib.sha256()
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        for file in sorted(Path(folder).rglob("*.py")):
            digest.update(file.read_bytes())
    return digest.hexdigest()


@dataclass(frozen=True)
class OpenedFiles:
    """All files that a model consists of, as they were when it was opened.

    `folder`: where they are read from; `main`: the name of the one that was named; `digests`: the name and the SHA-256
    of each, names within the folder; `source`: where the main file lay; `is_copy`: whether the folder is ours.
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
        """Every file, where links lead. Raises WeightsError for one that leads out of the folder."""
        folder = Path(self.folder)
        return [place_of(folder / name, folder) for name, _ in self.digests]

    @property
    def sha256(self) -> str:
        """Of all together (`digest_of_all`)."""
        return digest_of_all(self.digests)

    def check(self) -> None:
        """Raises WeightsError where one is not as it was, or no longer there."""
        for name, wanted in self.digests:
            found = sha256_of(Path(self.folder, name), Path(self.folder))
            if found != wanted:
                raise WeightsError(
                    f"{Path(self.folder, name)} has SHA-256 {found}, not {wanted} as when {Path(self.source).name} was "
                    "opened: load the model again, or put the file back."
                )

    def hold(self) -> bool:
        """Keep a copy from being removed as long as this object lives in this process; False: it is being removed, or
        not there.
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
        except OSError:  # A file system without locks, on which nothing is removed.
            return True
        return True
