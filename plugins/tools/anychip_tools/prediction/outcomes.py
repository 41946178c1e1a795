"""What became of each image, and the file it is written to while the work goes on.

    outcomes ─► Journal (JSON Lines, a line an image, appended) ─► CSV, Parquet or COCO JSON, when all is done

Owns: the line of an image, and going on where an interrupted run has stopped. Must not hold results in memory: a run
may have a hundred thousand of them.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Protocol

import orjson

from anychip_tools.prediction.image_sources import ImageSource
from app.arguments import CommandError

Prediction = Mapping[str, Any]
"""One entry of "predictions" (docs/api.md), as postprocessing returns it or as JSON brought it."""

Line = Mapping[str, Any]
"""A line of a journal: `file` and `model`, then a prediction or `error`."""


_FLUSHED_EVERY_S = 0.2


class FileOutcome(NamedTuple):
    """What became of an image: its prediction, or why there is none. `encoded` is the file, None if it was not read."""

    source: ImageSource
    prediction: Prediction | None
    error: str = ""
    encoded: bytes | None = None


class Predicting(Protocol):
    """Something that predicts for many images: a device here, or a service elsewhere."""

    @property
    def model(self) -> str:
        """The model's name."""

    @property
    def weights(self) -> str:
        """Where its weights come from."""

    def outcomes(self, sources: Iterator[ImageSource]) -> Iterator[FileOutcome]:
        """One outcome a source, in any order; few are under way at a time."""


class Journal:
    """A JSON Lines file of outcomes. A context manager: what was written is there when it ends, however it ends."""

    def __init__(self, path: Path, model: str, *, resume: bool) -> None:
        """`resume`: keep what the file holds; images that failed are tried again.

        Raises CommandError when the file holds another model's answers, OSError.
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    @property
    def done(self) -> int:
        """How many images an earlier run has left here."""
        return len(self._done)

    def holds(self, path: str) -> bool:
        """Whether an earlier run has answered for this file."""
        return bool(self._done) and _digest(path) in self._done

    def write(self, outcome: FileOutcome, weights: str) -> None:
        """Append an outcome. A kill loses the lines of a moment, and at most a part of one line."""
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
    """The lines of a journal, one at a time; one that was cut off at the end is left out. Raises CommandError."""
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
    """Eight bytes for a path: a set of a hundred thousand of them stays small."""
    return hashlib.blake2b(os.fsencode(path), digest_size=8).digest()
