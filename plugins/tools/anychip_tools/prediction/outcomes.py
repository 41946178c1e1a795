"""Outcomes of images, and the file that they are written to during the work.

    outcomes ─► Journal (JSON Lines, a line an image, appended) ─► CSV, Parquet or COCO JSON, when all is done

Owns: the line of an image, and resuming an interrupted run. Must not hold results in memory: a run
may have a hundred thousand of them.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import orjson

from anychip_tools.prediction.image_sources import ImageSource
from app.arguments import CommandError

Prediction = Mapping[str, Any]
"""Entry of "predictions" (docs/api.md), from postprocessing or from JSON."""

Line = Mapping[str, Any]
"""Line of a journal: `file` and `model`, then a prediction or `error`."""


_FLUSHED_EVERY_S = 0.2


class FileOutcome(NamedTuple):
    """Outcome of an image: its prediction, or why there is none. `encoded` is the file, None if it was not read."""

    source: ImageSource
    prediction: Prediction | None
    error: str = ""
    encoded: bytes | None = None


class Predicting(Protocol):
    """Predictor for many images: a device here, or a service elsewhere. `weights`: where the model's are from."""

    model: str
    weights: str

    def outcomes(self, sources: Iterator[ImageSource]) -> Iterator[FileOutcome]:
        """Yield one outcome a source, in any order; few are in flight at a time."""


class Journal:
    """JSON Lines file of outcomes. Context manager: every line written is in the file at its end, also on errors."""

    def __init__(self, path: Path, model: str, *, resume: bool) -> None:
        """Open the file. `resume`: keep its lines; images that failed are tried again.

        Raises CommandError if the file holds another model's answers, OSError.
        """
        self.path = path
        self._model = model
        self._done: set[bytes] = set()
        if resume and path.exists():
            self._keep_good_lines()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab" if resume else "wb")
        self._flushed_s = 0.0

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    @property
    def done(self) -> int:
        """Number of images that an earlier run has answered here."""
        return len(self._done)

    def holds(self, path: str) -> bool:
        """Return True if an earlier run has answered for this file."""
        return bool(self._done) and _digest(path) in self._done

    def write(self, outcome: FileOutcome, weights: str) -> None:
        """Append an outcome. A kill loses the lines of a moment, and cuts off at most one line."""
        line: dict[str, Any] = {"file": outcome.source.path, "model": self._model}
        if outcome.prediction is None:
            line["error"] = outcome.error
        else:
            line.update(weights=weights, **outcome.prediction)
        self._file.write(_encoded(line))
        if (now_s := time.monotonic()) - self._flushed_s >= _FLUSHED_EVERY_S:
            self._flushed_s = now_s
            self._file.flush()

    def _keep_good_lines(self) -> None:
        """Drop errors and a last line that was cut off; remember the rest."""
        kept = self.path.with_name(self.path.name + ".kept")
        with kept.open("wb") as target:
            for line in read_lines(self.path):
                if line.get("model") != self._model:
                    kept.unlink()
                    raise CommandError(
                        f"{self.path} holds answers of {line.get('model')}, not of {self._model}: name another --output"
                    )
                if "error" not in line:
                    target.write(_encoded(line))
                    self._done.add(_digest(line["file"]))
        os.replace(kept, self.path)


def read_lines(path: Path) -> Iterator[Line]:
    """Yield the lines of a journal; leave out a last one that was cut off. Raises CommandError."""
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.endswith(b"\n"):
                return
            try:
                document = orjson.loads(line)
            except orjson.JSONDecodeError:
                document = None
            if not isinstance(document, dict) or "file" not in document:
                raise CommandError(f"line {number} of {path} is none that anychip predict has written")
            yield document


def _encoded(line: Line) -> bytes:
    return orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE | orjson.OPT_SERIALIZE_NUMPY)


def _digest(path: str) -> bytes:
    """Return eight bytes for a path: a set of a hundred thousand of them stays small."""
    return hashlib.blake2b(os.fsencode(path), digest_size=8).digest()
