"""Download of one file over HTTP: resumed where it stopped, compared with its digest, named only when it is whole.

Owns: requests, partial files, the words on progress, the sentences for what fails. Must not know what is in a file, nor
why it is wanted. No message holds a query, a password or a header: these may be secrets.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING

from models.addresses import without_secrets
from models.contract.errors import WeightsError, WeightsNotFoundError
from models.contract.files import open_regular, sha256_of

if TYPE_CHECKING:
    import httpx

log = logging.getLogger("anychip.downloads")

ATTEMPTS = 5
PERIOD_S = 5.0
"""Time between lines of the log on a download."""
_CONNECT_TIMEOUT_S = 10.0
_READ_TIMEOUT_S = 30.0
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class RemoteFile:
    """File to download. `name`: its name in the folder.

    `sha256`: the whole checksum or its beginning; `git_sha1`: instead of it, Git's name of the content; `size_bytes`:
    None if unknown. `remedy`: what to do without it.
    """

    name: str
    url: str
    sha256: str
    git_sha1: str = ""
    size_bytes: int | None = None
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    remedy: str = ""

    def check(self, path: Path) -> None:
        """Compare a file with size and digest. Raises WeightsError."""
        size_bytes = path.stat().st_size
        if self.size_bytes is not None and size_bytes != self.size_bytes:
            raise WeightsError(f"{self.name} has {size_bytes} bytes, not the {self.size_bytes} that were published.")
        kind, wanted = ("Git's SHA-1", self.git_sha1) if self.git_sha1 else ("SHA-256", self.sha256)
        digest = _git_sha1(path) if self.git_sha1 else sha256_of(path)
        if not digest.startswith(wanted):
            raise WeightsError(f"{self.name} has {kind} {digest}, not {wanted}; delete it.")


def downloaded(file: RemoteFile, directory: Path) -> Path:
    """Download into `directory`, resuming an earlier attempt, and check size and digest.

    The file gets its name only when it is complete. Another process that needs the same file waits. The log says every
    few seconds how far it is. Raises WeightsNotFoundError, WeightsError.
    """
    import httpx

    target = directory / file.name
    partial = directory / f"{file.name}.part"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with _locked(directory / f"{file.name}.lock"):
            if not target.is_file():
                _download_whole(file, partial)
                partial.replace(target)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        reason = without_secrets(str(error)).rstrip(".") or type(error).__name__
        if isinstance(error, httpx.HTTPStatusError):
            reason = f"HTTP {error.response.status_code}"
        raise WeightsNotFoundError(
            f"{without_secrets(file.url)} could not be downloaded ({reason}); {file.remedy}"
        ) from error
    except OSError as error:
        raise WeightsNotFoundError(f"{target} could not be written: {error.strerror or error}.") from error
    return target


def megabytes(size_bytes: int) -> str:
    """Return a size for people, in MB."""
    return f"{size_bytes / 1e6:.1f} MB"


def _download_whole(file: RemoteFile, partial: Path) -> None:
    import httpx

    logging.getLogger("httpx").addFilter(_without_secrets)  # It logs each address as it is.
    timeout = httpx.Timeout(_READ_TIMEOUT_S, connect=_CONNECT_TIMEOUT_S)
    hooks = {"request": [_stay_encrypted]} if file.url.startswith("https:") else {}
    with httpx.Client(follow_redirects=True, timeout=timeout, event_hooks=hooks) as client:
        for attempt in range(ATTEMPTS):
            resumed = partial.exists()
            try:
                _download_rest(client, file, partial)
            except httpx.TransportError:
                if attempt + 1 < ATTEMPTS and partial.exists():
                    continue  # the connection broke: go on where it ended
                raise
            try:
                file.check(partial)
            except WeightsError:
                partial.unlink(missing_ok=True)
                if resumed:
                    continue  # the earlier part may be of another file: once more, from the beginning
                raise
            log.info("%s is here, %s", file.name, megabytes(partial.stat().st_size))
            return
    raise WeightsNotFoundError(f"{without_secrets(file.url)} could not be downloaded in {ATTEMPTS} attempts.")


def _without_secrets(record: logging.LogRecord) -> bool:
    if isinstance(record.args, tuple):
        record.args = tuple(without_secrets(str(each)) if "://" in str(each) else each for each in record.args)
    return True


def _stay_encrypted(request: httpx.Request) -> None:
    if request.url.scheme != "https":
        raise WeightsNotFoundError(f"{without_secrets(str(request.url))} is not encrypted, and https:// leads there.")


def _download_rest(client: httpx.Client, file: RemoteFile, partial: Path) -> None:
    start = partial.stat().st_size if partial.exists() else 0
    headers = {**file.headers, "Accept-Encoding": "identity"}
    if start:
        headers["Range"] = f"bytes={start}-"
    with client.stream("GET", file.url, headers=headers) as response:
        if response.status_code == 416:
            return  # nothing is left to send; the check decides whether this is the whole file
        response.raise_for_status()
        if response.status_code != 206:
            start = 0
        sent = response.headers.get("Content-Length", "")
        total = start + int(sent) if sent and "Content-Encoding" not in response.headers else None
        if None not in (total, file.size_bytes) and total != file.size_bytes:
            raise WeightsError(f"{without_secrets(file.url)} offers {total} bytes, not {file.size_bytes}.")
        whole, came, logged_s = "" if total is None else f" of {megabytes(total)}", start, time.monotonic()
        place = without_secrets(file.url).rpartition("/")[0]
        log.info("%s: %s%s are here, the rest is being downloaded from %s", file.name, megabytes(start), whole, place)
        with partial.open("ab" if start else "wb") as written:
            for chunk in response.iter_bytes():  # as it comes: a chunk size would lose bytes before a break
                written.write(chunk)
                came += len(chunk)
                if time.monotonic() - logged_s > PERIOD_S:
                    logged_s = time.monotonic()
                    log.info("%s: %s%s", file.name, megabytes(came), whole)


def _git_sha1(path: Path) -> str:
    with open(open_regular(path), "rb", buffering=0) as file:
        digest = hashlib.sha1(b"blob %d\0" % os.fstat(file.fileno()).st_size, usedforsecurity=False)
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[IO[bytes]]:
    """Hold a lock for one process at a time; the system releases it when the process ends in any way."""
    with path.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file
