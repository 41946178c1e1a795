"""TorchServe's model archives (.mar): extraction of weights and labels into temporary files.

Owns: the archive's manifest and its files' names. Must not read weights, and never runs the Python files in an archive.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from models.contract.errors import WeightsError, WeightsNotFoundError

SUFFIX = ".mar"
_MANIFEST = "MAR-INF/MANIFEST.json"
_LABELS = "index_to_name.json"
_LARGEST_TEXT_BYTES = 16 << 20


@contextlib.contextmanager
def unpacked(archive: Path) -> Iterator[Path]:
    """Yield the serialised file of an archive, with its labels beside it, in a temporary folder.

    Raises WeightsNotFoundError, WeightsError.
    """
    if not archive.is_file():
        raise WeightsNotFoundError(f"There is no archive {archive}.")
    with tempfile.TemporaryDirectory(prefix="anychip-mar-") as folder:
        try:
            with zipfile.ZipFile(archive) as opened:
                model = json.loads(_text(opened, _MANIFEST))["model"]
                name = str(model["serializedFile"])
                target = Path(folder) / PurePosixPath(name).name
                with opened.open(name) as packed, target.open("wb") as written:
                    shutil.copyfileobj(packed, written)
                if _LABELS in opened.namelist():
                    labels = _labels(json.loads(_text(opened, _LABELS)))
                    target.with_name(f"{target.stem}.labels.txt").write_text("\n".join(labels), encoding="utf-8")
        except (zipfile.BadZipFile, KeyError, TypeError, ValueError, OSError) as error:
            raise WeightsError(
                f"{archive.name} is no archive of TorchServe that holds a serialised file: {error}."
            ) from error
        yield target


def _text(opened: zipfile.ZipFile, name: str) -> bytes:
    if opened.getinfo(name).file_size > _LARGEST_TEXT_BYTES:
        raise ValueError(f"{name} is too large")
    return opened.read(name)


def _labels(table: dict[str, str | list[str]]) -> list[str]:
    """Return the labels of `{"0": "cat"}` or ImageNet's `{"0": ["n02123045", "tabby"]}`, ordered by number."""
    rows = [table[str(number)] for number in range(len(table))]
    return [row if isinstance(row, str) else row[-1] for row in rows]
