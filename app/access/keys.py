"""API keys: a file of their hashes, read again when it changes.

    sha256:9f86d081884c… NAME infer requests=8 images_per_s=50 priority=10

A key is 256 random bits, so a plain SHA-256 hides it. The time of a look-up says nothing about the hashes, nor about
keys that were found and are remembered as they were sent: a `dict` compares bytes only if Python's hashes of them are
equal, and these are keyed anew in each process.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import re
import secrets
import stat
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Literal, cast, get_args

from app import clock

log = logging.getLogger("anychip.access")

Role = Literal["infer", "admin"]
PREFIX = "ak_"
LONGEST_KEY = 256
MAX_FILE_BYTES = 4 * 2**20

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
_LOOK_AGAIN_S = 1.0


class KeysError(Exception):
    """Failure to use the file of keys; the message is one plain sentence."""


@dataclass(frozen=True)
class CallerLimits:
    """Limits of one caller; 0: no limit of its own. `priority`: the highest it may ask for."""

    requests: int = 0
    bytes: int = 0
    pixels: int = 0
    images_per_s: float = 0.0
    priority: int = 0

    @cached_property
    def any(self) -> bool:
        """True if one of them counts requests in flight, or their rate."""
        return bool(self.requests or self.bytes or self.pixels or self.images_per_s)


@dataclass(frozen=True, slots=True)
class Key:
    """A key of the file, by its name."""

    name: str
    role: Role
    limits: Mapping[str, float]
    """Limits that the file names; the service's hold for the others."""

    def limited(self, defaults: CallerLimits) -> CallerLimits:
        """Return the limits of this key."""
        kinds = {field.name: type(getattr(defaults, field.name)) for field in fields(defaults)}
        return replace(defaults, **{name: kinds[name](value) for name, value in self.limits.items()})


_LIMITS = frozenset(field.name for field in fields(CallerLimits))


def client_limits(text: str) -> CallerLimits:
    """Read the setting `client_limits`, which every client has. Raises KeysError."""
    try:
        limits = _limits(text.replace(",", " ").split(), _LIMITS - {"priority"})
    except KeysError as error:
        raise KeysError(f"--client-limits: {error}") from None
    return Key("", "infer", limits).limited(CallerLimits())


def stamp(path: Path) -> tuple[int, ...]:
    """Return the stamp of a link's target, as Kubernetes changes that; empty if nothing is there."""
    try:
        found = path.stat()
    except OSError:
        return ()
    return found.st_ino, found.st_dev, found.st_mtime_ns, found.st_size


def digest_of(key: str | bytes) -> bytes:
    """Return the SHA-256 of a key."""
    return hashlib.sha256(key.encode() if isinstance(key, str) else key).digest()


def parse(text: str) -> dict[bytes, Key]:
    """Return the keys by their SHA-256. Raises KeysError, which names the line and never its content."""
    found: dict[bytes, Key] = {}
    names = set()
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        if len(words) < 3 or not (digest := _DIGEST.fullmatch(words[0].lower())):
            raise KeysError(f"line {number} is not `sha256:… NAME ROLE`; `anychip keys add` writes such lines")
        name, role = words[1], cast(Role, words[2])
        if not _NAME.fullmatch(name):
            raise KeysError(f"line {number} has a name that is not up to 64 letters, digits, dots, dashes, @")
        if role not in get_args(Role):
            raise KeysError(f"line {number} has a role that is neither infer nor admin")
        try:
            key = Key(name, role, _limits(words[3:], _LIMITS))
        except KeysError as error:
            raise KeysError(f"line {number}: {error}") from None
        hashed = bytes.fromhex(digest[1])
        if name in names or hashed in found:
            raise KeysError(f"line {number} has a name or a key that another line has")
        names.add(name)
        found[hashed] = key
    return found


def _limits(words: list[str], names: frozenset[str]) -> dict[str, float]:
    limits = {}
    for word in words:
        name, _, value = word.partition("=")
        try:
            limit = float(value)
        except ValueError:
            limit = math.nan
        if name not in names or name in limits or not 0 <= limit <= 1e18:
            raise KeysError(f"a limit is one of {', '.join(sorted(names))}, each once, as NAME=NUMBER")
        limits[name] = limit
    return limits


def read(path: Path) -> dict[bytes, Key]:
    """Read the keys of a file. Raises KeysError."""
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_mode & stat.S_IWOTH:
                raise KeysError(f"{path} may be written by everybody on this machine; chmod o-w {path}")
            text = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise KeysError(f"{path} cannot be read: {error.strerror}") from None
    if len(text) > MAX_FILE_BYTES:
        raise KeysError(f"{path} is larger than {MAX_FILE_BYTES} bytes")
    try:
        return parse(text.decode())
    except UnicodeDecodeError:
        raise KeysError(f"{path} is not UTF-8") from None
    except KeysError as error:
        raise KeysError(f"{path}: {error}") from None


class Keys:
    """The keys of a file, as it is now."""

    def __init__(self, path: Path) -> None:
        """Read the file. Raises KeysError."""
        self.path = path
        self._seen = stamp(path)
        self._look_s = clock.monotonic() + _LOOK_AGAIN_S
        self._by_digest = read(path)
        self._found: dict[bytes, Key] = {}  # By the key as sent: at most one entry a key of the file.

    def find(self, sent: bytes) -> Key | None:
        """Return the key that was sent; None if there is none like it."""
        if clock.monotonic() >= self._look_s:
            self._look_again()
        known = self._found.get(sent)
        if known is not None or len(sent) > LONGEST_KEY:
            return known
        key = self._by_digest.get(digest_of(sent))
        if key is not None:
            self._found[sent] = key
        return key

    def _look_again(self) -> None:
        """Read the file again if it has changed. A file that cannot be read changes nothing: the log says so."""
        self._look_s = clock.monotonic() + _LOOK_AGAIN_S
        before, self._seen = self._seen, stamp(self.path)
        if self._seen == before:
            return
        try:
            self._by_digest = read(self.path)
        except KeysError as error:
            log.error("the keys stay as they were: %s", error)
        else:
            self._found.clear()
            log.info("%d keys read again from %s", len(self._by_digest), self.path)


def add(path: Path, name: str, role: Role) -> str:
    """Make a key, append its hash to the file (made for its owner alone if need be), and return the key.

    Raises KeysError.
    """
    known = read(path) if path.exists() else {}
    if not _NAME.fullmatch(name):
        raise KeysError("a name is up to 64 letters, digits, dots, dashes, @")
    if any(key.name == name for key in known.values()):
        raise KeysError(f"{path} has a key of the name {name}; remove its line to replace it")
    key = PREFIX + secrets.token_urlsafe(32)
    try:
        with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600), "rb+") as file:
            size = file.seek(0, os.SEEK_END)
            begins = b""
            if size:
                file.seek(-1, os.SEEK_END)
                begins = b"" if file.read(1) == b"\n" else b"\n"
            file.write(b"%ssha256:%s %s %s\n" % (begins, digest_of(key).hex().encode(), name.encode(), role.encode()))
    except OSError as error:
        raise KeysError(f"{path} cannot be written: {error.strerror}") from None
    return key
