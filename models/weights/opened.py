"""Copies of a model's files, made when it is opened; every process reads from them.

    the folder that was named ─► each file by descriptor, with its digest ─► CACHE/opened/DIGEST/, files of ours

Owns: making, finding and removing these copies. Must not know which files a model consists of (models.exports.files),
nor their content. A file that is replaced, cut or removed afterwards changes nothing for a worker that starts then.
Without room for a copy, files stay in place, and a worker refuses those that have changed.

Several services may share the folder: a copy is made under another name and renamed, and a copy that a process holds
(`OpenedFiles.hold`) is not removed.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path, PurePosixPath

from models.contract.errors import WeightsError, WeightsNotFoundError
from models.contract.files import OpenedFiles, listed, open_regular, sha256_of

log = logging.getLogger(__name__)

_UNUSED_S = 7 * 86_400.0
_SPARE_BYTES = 256 << 20
"""Bytes that stay free on the disk."""


def looked_at(
    file: Path, beside: Iterable[str] = (), within: Callable[[Path], Iterable[str]] = lambda _: ()
) -> OpenedFiles:
    """Find the files of a model in their place, with the digest of each.

    `beside`: names of files that belong to it if they exist; `within`: returns the files that the file itself names.
    Raises WeightsNotFoundError, WeightsError.
    """
    folder = Path(os.path.realpath(file.parent))
    digests: dict[str, str] = {}
    for name in (file.name, *beside):
        if os.path.lexists(folder / name):
            digests[_checked(name, file.name)] = sha256_of(folder / name, folder)
    if file.name not in digests:
        raise WeightsNotFoundError(f"There is no file {str(file)!r}.")
    for name in within(folder / file.name):
        if (inside := _checked(name, file.name)) not in digests:
            try:
                digests[inside] = sha256_of(folder / inside, folder)
            except WeightsError as error:
                reason = f"{file.name} keeps its weights in {name!r}, which is not beside it"
                raise WeightsError(f"{reason}: {error}") from None
    return OpenedFiles(str(folder), file.name, tuple(sorted(digests.items())), os.path.abspath(file))


def copied(files: OpenedFiles, store: Path) -> OpenedFiles:
    """Copy these files to a folder of ours, and hold the copy; without room for one, return the originals.

    Raises WeightsError for a file that has changed meanwhile.
    """
    entry = hashlib.sha256(listed(files.digests).encode()).hexdigest()
    copy = replace(files, folder=str(store.absolute() / entry), is_copy=True)
    if copy.hold() and _is_whole(copy):
        return copy
    try:
        _make(copy, files)
    except OSError as error:
        log.warning(
            "%s is served from where it lies, as %s takes no copy (%s)", files.source, store, error.strerror or error
        )
        return files
    return copy


def mend(files: OpenedFiles) -> bool:
    """Copy the files anew if their copy is damaged. Return True if it was: a confined process cannot read the new ones.

    Raises WeightsError if the copy cannot be made anew, or if files without a copy have changed.
    """
    if not files.is_copy or _is_whole(files):
        files.check()
        return False
    source = Path(files.source)
    try:
        _make(files, replace(files, folder=os.path.realpath(source.parent), is_copy=False))
    except (WeightsError, OSError) as error:
        raise WeightsError(
            f"its copy in {files.folder} is damaged, and cannot be made again from {source}: {error}"
        ) from None
    log.warning("the copy of %s in %s was damaged, and was made again", source, files.folder)
    return True


def _checked(name: str, main: str) -> str:
    path = PurePosixPath(name)
    if not name or path.is_absolute() or ".." in path.parts or not path.parts or not name.isprintable() or "\\" in name:
        raise WeightsError(f"{main} keeps its weights in {name!r}, which is not beside it.")
    return str(path)


def _is_whole(copy: OpenedFiles) -> bool:
    try:
        copy.check()
        os.utime(copy.folder)  # It is in use.
    except (WeightsError, OSError):
        return False
    return True


def _make(copy: OpenedFiles, original: OpenedFiles) -> None:
    target = Path(copy.folder)
    store = target.parent
    store.mkdir(parents=True, exist_ok=True, mode=0o700)
    size_bytes = sum(path.stat().st_size for path in original.paths)
    remove_unused(store, size_bytes + _SPARE_BYTES)
    if shutil.disk_usage(store).free < size_bytes + _SPARE_BYTES:
        raise OSError(f"{size_bytes + _SPARE_BYTES} bytes would have to be free")
    partial = Path(tempfile.mkdtemp(prefix=".", suffix=".part", dir=store))
    cut = partial.with_suffix(".old")
    try:
        with _held(partial, fcntl.LOCK_SH):
            for name, digest in copy.digests:
                _copy(original, name, partial / name, digest)
            with _held(store, fcntl.LOCK_EX):
                # Another service was faster, or the present copy is not whole.
                if not _is_whole(copy):
                    if target.exists():
                        target.rename(cut)
                    partial.rename(target)
                    with _held(store, None) as descriptor:
                        os.fsync(descriptor)
        copy.hold()
    finally:
        for each in (partial, cut):
            shutil.rmtree(each, ignore_errors=True)


def _copy(original: OpenedFiles, name: str, target: Path, wanted: str) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    source = open_regular(Path(original.folder, name), Path(original.folder))
    digest = hashlib.sha256()
    with open(source, "rb", buffering=0) as read, open(target, "xb") as written:
        os.fchmod(written.fileno(), 0o400)
        while chunk := read.read(1 << 20):
            digest.update(chunk)
            written.write(chunk)
        written.flush()
        os.fsync(written.fileno())
    if digest.hexdigest() != wanted:
        raise WeightsError(f"{name} changed while it was read: load the model again once it is written.")


def remove_unused(store: Path, wanted_bytes: int = 0) -> None:
    """Remove copies that nobody holds: those older than a week, and more until `wanted_bytes` are free."""
    with contextlib.suppress(OSError):
        entries = [(path.stat().st_mtime, path) for path in store.iterdir()]
        for used_s, path in sorted(entries):
            is_old = time.time() - used_s > _UNUSED_S or path.suffix == ".old"
            if is_old or shutil.disk_usage(store).free < wanted_bytes:
                with contextlib.suppress(OSError), _held(path, fcntl.LOCK_EX | fcntl.LOCK_NB):
                    shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def _held(folder: Path, how: int | None) -> Iterator[int]:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if how is not None:
            fcntl.flock(descriptor, how)
        yield descriptor
    finally:
        os.close(descriptor)
