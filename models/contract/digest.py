"""SHA-256 of files, as people name it for weights that must be these and no others.

Owns: computing it and the sentence where it is another. Must not know what is in a file.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from models.contract.errors import WeightsError

_CHUNK_BYTES = 1 << 20


def sha256_of(path: Path) -> str:
    """In hexadecimal. Raises WeightsError."""
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
    except OSError as error:
        raise WeightsError(f"{path.name} cannot be read: {error.strerror}.") from None
    return digest.hexdigest()


def check_sha256(path: Path, wanted: str) -> None:
    """Raises WeightsError where the file is another than was wanted."""
    found = sha256_of(path)
    if found != wanted:
        raise WeightsError(f"{path.name} has SHA-256 {found}, not {wanted} as it should.")
