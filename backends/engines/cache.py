"""Cache of compiled networks on disk: each whole or absent, checked before use, and bounded together.

Entries are machine code and pickles, and they are run. They are therefore signed (HMAC-SHA256) with a key that only
this user can read. Compilers that keep files by themselves get no folder that others may write to.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import hmac
import json
import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

LIMIT_BYTES = 8 << 30
_MANIFEST = "manifest.json"
_KEY = ".key"
_KEY_BYTES = 32
_BLOCK = 1 << 20

_warned: set[Path] = set()
"""Folders for which the log already says that nothing is kept in them."""

log = logging.getLogger(__name__)


class EngineCache:
    """Cache in `folder`; each entry is a directory of files. Several processes may use one folder at once."""

    def __init__(self, folder: Path, limit_bytes: int = LIMIT_BYTES) -> None:
        self._folder, self._limit_bytes = folder, limit_bytes

    def get(self, **parts: object) -> Path | None:
        """Return the entry of these parts (names of its sources and tools); None if absent. A broken one is removed."""
        entry = self._entry(parts)
        try:
            manifest = json.loads((entry / _MANIFEST).read_text(encoding="utf-8"))
            signed = hmac.compare_digest(str(manifest["signature"]), self._signature(entry.name, manifest["files"]))
            whole = signed and _digests(entry) == manifest["files"]
        except FileNotFoundError:
            if not entry.exists():
                return None
            whole = False
        except (OSError, ValueError, KeyError, TypeError):
            whole = False
        if not whole:
            log.warning("a compiled network in the cache is damaged or another user's, and made again: %s", entry.name)
            shutil.rmtree(entry, ignore_errors=True)
            return None
        with contextlib.suppress(OSError):  # A read-only cache serves, too.
            os.utime(entry)  # It was used: others go first.
        return entry

    def put(self, write: Callable[[Path], object], **parts: object) -> Path | None:
        """Let `write` fill a directory and keep it as the entry of these parts. Return None if it is not kept: the disk
        is full, or `write` raises anything, as libraries have exceptions of their own for a full disk.
        """
        entry = self._entry(parts)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            own = Path(tempfile.mkdtemp(prefix=".new-", dir=self._folder))
        except OSError as error:
            self._not_kept(error)
            return None
        try:
            write(own)
            files = _digests(own)
            described = {
                "files": files,
                "parts": {name: str(part) for name, part in parts.items()},
                "signature": self._signature(entry.name, files),
            }
            (own / _MANIFEST).write_text(json.dumps(described, indent=1), encoding="utf-8")
            own.rename(entry)
        except Exception as error:
            if not entry.exists():  # Else another process was quicker: its entry is as good.
                self._not_kept(error)
                return None
        finally:
            shutil.rmtree(own, ignore_errors=True)
        bound(self._folder, entry, self._limit_bytes)
        return entry

    def _not_kept(self, error: Exception) -> None:
        if self._folder not in _warned:
            _warned.add(self._folder)
            log.warning("what is compiled cannot be kept in %s, and is made again next time: %s", self._folder, error)

    def _signature(self, name: str, files: Mapping[str, str]) -> str:
        text = json.dumps([name, sorted(files.items())])
        return hmac.new(_host_key(self._folder), text.encode(), hashlib.sha256).hexdigest()

    def _entry(self, parts: dict[str, object]) -> Path:
        text = json.dumps({name: str(part) for name, part in parts.items()}, sort_keys=True)
        return self._folder / hashlib.sha256(text.encode()).hexdigest()[:32]


def bound(folder: Path, kept: Path, limit_bytes: int = LIMIT_BYTES) -> None:
    """Remove the least recently used folders in `folder` until all are within the limit; never `kept`."""
    entries = []
    for entry in folder.iterdir():
        with contextlib.suppress(OSError):
            if entry.is_dir() and not entry.name.startswith("."):
                size = sum(path.stat().st_size for path in entry.rglob("*") if path.is_file())
                entries.append((entry.stat().st_mtime, size, entry))
    total = sum(size for _, size, _ in entries)
    for _, size, entry in sorted(entries):
        if total <= limit_bytes:
            return
        if entry != kept:
            shutil.rmtree(entry, ignore_errors=True)
            total -= size


def _digests(entry: Path) -> dict[str, str]:
    """Return the SHA-256 of every file of an entry but its manifest, by name, so that an added file is noticed, too."""
    found = {}
    for path in sorted(entry.rglob("*")):
        if path.is_symlink() or (path.is_file() and path.name != _MANIFEST):
            digest = hashlib.sha256()
            with path.open("rb") as file:
                while block := file.read(_BLOCK):
                    digest.update(block)
            found[str(path.relative_to(entry))] = digest.hexdigest()
    return found


def private_folder(path: Path) -> Path | None:
    """Return a folder that no other user may write to, made if need be; None if it cannot be, or others may write.

    This is for compilers that keep files in their own way, and load them without asking who made them.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = path.stat()
    except OSError as error:
        log.warning("nothing compiled is kept in %s: %s", path, error)
        return None
    if found.st_uid not in (0, os.geteuid()) or found.st_mode & 0o022:
        log.warning("nothing compiled is kept in %s: others may write to it; chmod go-w, or remove it", path)
        return None
    return path


def _host_key(folder: Path) -> bytes:
    """Return this user's key on this host: made at first need, and anew if another user could have put it there."""
    path = folder / _KEY
    if (key := _trusted_key(path)) is not None:
        return key
    lock = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # A file system without locks: the last key stays, and some are made again.
            fcntl.flock(lock, fcntl.LOCK_EX)
        return _trusted_key(path) or _new_key(path)
    finally:
        os.close(lock)


def _trusted_key(path: Path) -> bytes | None:
    """Return the file's key, None if it is missing, or of another length, or others may read or write it."""
    with contextlib.suppress(OSError):
        found = path.lstat()
        if stat.S_ISREG(found.st_mode) and found.st_uid in (0, os.geteuid()) and not found.st_mode & 0o077:
            key = path.read_bytes()
            return key if len(key) == _KEY_BYTES else None
    return None


def _new_key(path: Path) -> bytes:
    descriptor, own = tempfile.mkstemp(prefix=".key-", dir=path.parent)  # 0600
    key = os.urandom(_KEY_BYTES)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(key)
        os.replace(own, path)
    except BaseException:
        Path(own).unlink(missing_ok=True)
        raise
    return key
