"""Compiled networks on disk: each whole or not there, checked before it is used, and bounded together.

Owns: names, integrity and size of the entries. Must not know what is in them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import shutil
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path

LIMIT_BYTES = 8 << 30
_MANIFEST = "manifest.json"
_BLOCK = 1 << 20

log = logging.getLogger(__name__)


class EngineCache:
    """Entries in `folder`, each a directory of files. Several processes may use one folder at once."""

    def __init__(self, folder: Path, limit_bytes: int = LIMIT_BYTES) -> None:
        self._folder, self._limit_bytes = folder, limit_bytes

    def get(self, **parts: object) -> Path | None:
        """The entry of these parts (names of what it was made of and with), None where it is not there or broken.

        A broken one is removed.
        """
        entry = self._entry(parts)
        try:
            manifest = json.loads((entry / _MANIFEST).read_text(encoding="utf-8"))
            whole = all(_checksum(entry / name) == wanted for name, wanted in manifest["files"].items())
        except FileNotFoundError:
            if not entry.exists():
                return None
            whole = False
        except (OSError, ValueError, KeyError, TypeError):
            whole = False
        if not whole:
            log.warning("a compiled network in the cache is damaged and made again: %s", entry.name)
            shutil.rmtree(entry, ignore_errors=True)
            return None
        with contextlib.suppress(OSError):  # A read-only cache serves, too.
            os.utime(entry)  # It was used: others go first.
        return entry

    def put(self, write: Callable[[Path], None], **parts: object) -> Path | None:
        """Let `write` fill a directory and keep it as the entry of these parts; None where the disk does not take it.

        What `write` raises passes, and nothing is kept.
        """
        entry = self._entry(parts)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            own = Path(tempfile.mkdtemp(prefix=".new-", dir=self._folder))
        except OSError as error:
            log.warning("a compiled network cannot be kept: %s", error)
            return None
        try:
            write(own)
            files = {str(path.relative_to(own)): _checksum(path) for path in sorted(own.rglob("*")) if path.is_file()}
            described = {"files": files, "parts": {name: str(part) for name, part in parts.items()}}
            (own / _MANIFEST).write_text(json.dumps(described, indent=1), encoding="utf-8")
            own.rename(entry)
        except OSError as error:
            if not entry.exists():  # Else another process was quicker: its entry is as good.
                log.warning("a compiled network cannot be kept: %s", error)
                return None
        finally:
            shutil.rmtree(own, ignore_errors=True)
        self._bound(entry)
        return entry

    def _entry(self, parts: dict[str, object]) -> Path:
        text = json.dumps({name: str(part) for name, part in parts.items()}, sort_keys=True)
        return self._folder / hashlib.sha256(text.encode()).hexdigest()[:32]

    def _bound(self, kept: Path) -> None:
        """Remove what was not used for longest until the rest is within the limit; never the newest."""
        entries = []
        for entry in self._folder.iterdir():
            with contextlib.suppress(OSError):
                if entry.is_dir() and not entry.name.startswith("."):
                    size = sum(path.stat().st_size for path in entry.rglob("*") if path.is_file())
                    entries.append((entry.stat().st_mtime, size, entry))
        total = sum(size for _, size, _ in entries)
        for _, size, entry in sorted(entries):
            if total <= self._limit_bytes:
                return
            if entry != kept:
                shutil.rmtree(entry, ignore_errors=True)
                total -= size


def _checksum(path: Path) -> str:
    """Against damage, not against malice."""
    value = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            value = zlib.crc32(block, value)
    return f"{path.stat().st_size}-{value:08x}"
