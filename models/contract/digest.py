"""SHA-256 of files, as people name it to pin weights.

Owns: computing it, one digest for several files, and the error's sentence for a difference. Must not know what is in a
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
    """Return the SHA-256 in hexadecimal. `folder`: the file must lie in it, by default its own. Raises WeightsError."""
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
                raise WeightsError(
                    f"{Path(self.folder, name)} has SHA-256 {found}, not {wanted} as when {Path(self.source).name} was "
                    "opened: load the model again, or put the file back."
                )

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
        except OSError:  # A file system without locks, on which nothing is removed.
            return True
        return True
