"""Files of `anychip predict`: the images that it reads, and the answers, first JSON Lines, then CSV, Parquet or COCO.

Must not hold names or results in memory: a run may have a hundred thousand of them.
"""

from __future__ import annotations

import csv
import glob
import hashlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any, NamedTuple

import orjson

from anychip_base.extras import how_to_install
from app.arguments import CommandError

SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif"})
"""Suffixes of the files taken from a directory. A file given by name is read with any suffix."""
LINES = ".jsonl"
"""Suffix of a file that is a journal itself."""
COCO = ".json"
COLUMNS = ("file", "width", "height", "label", "class_id", "score", "x1", "y1", "x2", "y2", "error")
"""Columns of a table with one row a box, class, area (its share is the score) or value. An image with none, or one
that failed, has one row without them."""
_IN_LINE = {"file", "model", "weights", "error", "width", "height", "detections", "classes", "areas", "values"}
_IN_TABLE = {"label", "class_id", "score", "share", "area", "box"}
_IN_COCO = {*_IN_TABLE, "segments", "mask", "corners", "keypoints"}
_ROWS_AT_A_TIME = 20_000
_FLUSHED_EVERY_S = 0.2

Line = Mapping[str, Any]
"""Line of a journal: `file` and `model`, then a prediction or `error`."""


class ImageSource(NamedTuple):
    """File to read. `relative`: place of its drawing below the folder of drawings, without its suffix."""

    path: str
    relative: str


def find_images(arguments: Sequence[str]) -> Iterator[ImageSource]:
    """Yield every file of the arguments, in order; of a directory those of `SUFFIXES`, at any depth, by name.

    `@FILE` names a list, one path a line; `@-` reads it from standard input. Only the names of one directory at a time
    are held. Raises CommandError for a glob without a match, OSError for a list that cannot be read.
    """
    for argument in arguments:
        if argument.startswith("@"):
            yield from _listed(argument[1:])
            continue
        found = [argument]
        if not os.path.exists(argument) and glob.has_magic(argument):
            found = sorted(glob.iglob(argument, recursive=True))
        if not found:
            raise CommandError(f"nothing matches {argument}")
        for path in found:
            if os.path.isdir(path):
                yield from _inside(path, "")
            else:
                yield ImageSource(path, Path(path).stem)


def _listed(name: str) -> Iterator[ImageSource]:
    with nullcontext(sys.stdin) if name == "-" else open(name, encoding="utf-8-sig", errors="surrogateescape") as lines:
        yield from (ImageSource(line, Path(line).stem) for line in map(str.strip, lines) if line)


def _inside(folder: str, prefix: str) -> Iterator[ImageSource]:
    with os.scandir(folder) as entries:
        listed = sorted((entry.name, entry.path, entry.is_dir(follow_symlinks=False)) for entry in entries)
    for name, path, is_folder in listed:
        if is_folder:
            yield from _inside(path, f"{prefix}{name}/")
        else:
            stem, _, ending = name.rpartition(".")  # os.path.splitext takes as long as all the rest.
            if f".{ending.lower()}" in SUFFIXES and stem.strip("."):
                yield ImageSource(path, prefix + stem)


class FileOutcome(NamedTuple):
    """Outcome of an image: its entry of "predictions" (docs/api.md), or why there is none.

    `encoded`: the file; None if it was not read.
    """

    source: ImageSource
    prediction: Mapping[str, Any] | None
    error: str = ""
    encoded: bytes | None = None


class Journal(AbstractContextManager["Journal"]):
    """JSON Lines file of outcomes. Context manager: every line written is in the file at its end, also on errors."""

    def __init__(self, path: Path, model: str, *, resume: bool) -> None:
        """Open the file; `resume` keeps its answers. Raises OSError, CommandError if they are another model's."""
        self.path = path
        self._model = model
        self._done: set[bytes] = set()
        if resume and path.exists():
            self._keep_good_lines()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab" if resume else "wb")
        self._flushed_s = 0.0

    def __exit__(self, *_: object) -> None:
        self._file.close()

    @property
    def done(self) -> int:
        """Number of images that an earlier run has answered here."""
        return len(self._done)

    def holds(self, path: str) -> bool:
        """Return True if an earlier run has answered for this file."""
        return bool(self._done) and _digest(_text(path)) in self._done

    def write(self, outcome: FileOutcome, weights: str) -> None:
        """Append an outcome. A kill loses the lines of a moment, and cuts off at most one line."""
        line: dict[str, Any] = {"file": _text(outcome.source.path), "model": self._model}
        if outcome.prediction is None:
            line["error"] = _text(outcome.error)
        else:
            line.update(weights=weights, **outcome.prediction)
        self._file.write(_encoded(line))
        if (now_s := time.monotonic()) - self._flushed_s >= _FLUSHED_EVERY_S:
            self._flushed_s = now_s
            self._file.flush()

    def _keep_good_lines(self) -> None:
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


def _text(path: str) -> str:
    """Return a path in UTF-8, which JSON has to be: of a name in another encoding the bytes as \\udcXX."""
    return path.encode("utf-8", "backslashreplace").decode()


def _digest(text: str) -> bytes:
    """Return eight bytes for a path: a set of a hundred thousand of them stays small."""
    return hashlib.blake2b(text.encode(), digest_size=8).digest()


def convert(journal: Path, target: Path) -> list[str]:
    """Write `target` from a journal, in the form of its suffix, or leave it as it was. Return the names in the answers
    for which that form has no place. Raises CommandError, OSError.
    """
    unfinished, left_out = target.with_name(f"{target.name}.unfinished"), set[str]()
    try:
        _WRITERS[target.suffix.lower()](journal, unfinished, left_out)
        os.replace(unfinished, target)
    finally:
        unfinished.unlink(missing_ok=True)
    return sorted(left_out)


def check_boxes(prediction: Line) -> None:
    """Raise CommandError for an answer that COCO JSON cannot hold."""
    if "detections" not in prediction:
        raise CommandError("COCO JSON holds boxes, and this model answers with none: write .jsonl or .csv")


def check_format(output: Path, masks: str | None = None) -> None:
    """Check before the work that this file can be written here. Raises CommandError."""
    suffix = output.suffix.lower()
    if suffix not in (LINES, *_WRITERS):
        raise CommandError(f"{output} must end with {', '.join((LINES, *_WRITERS))}")
    if suffix == COCO and masks == "png":
        raise CommandError("COCO JSON holds masks as --masks polygon or rle, not as png")
    if suffix == ".parquet":
        try:
            import pyarrow.parquet  # noqa: F401
        except ImportError:
            raise CommandError(f"Parquet needs pyarrow: {how_to_install('parquet')}; or write .csv") from None


def _rows(journal: Path, left_out: set[str]) -> Iterator[tuple[Any, ...]]:
    for line in read_lines(journal):
        left_out |= line.keys() - _IN_LINE
        head = (line["file"], line.get("width"), line.get("height"))
        values = [{"label": name, "score": value} for name, value in line.get("values", {}).items()]
        found = line.get("detections") or line.get("classes") or line.get("areas") or values
        for each in found:
            left_out |= each.keys() - _IN_TABLE
            box = each.get("box", {})
            places = tuple(box.get(name) for name in ("x1", "y1", "x2", "y2"))
            score = each.get("score", each.get("share"))
            yield (*head, each["label"], each.get("class_id"), score, *places, None)
        if not found:
            yield (*head, None, None, None, None, None, None, None, line.get("error"))


def _write_csv(journal: Path, target: Path, left_out: set[str]) -> None:
    with target.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        writer.writerows(_rows(journal, left_out))


def _write_parquet(journal: Path, target: Path, left_out: set[str]) -> None:
    import pyarrow as arrow
    from pyarrow import parquet

    text, whole, number = arrow.string(), arrow.int32(), arrow.float64()
    kinds = (text, whole, whole, text, whole, number, number, number, number, number, text)
    schema = arrow.schema(list(zip(COLUMNS, kinds, strict=True)))
    every = _rows(journal, left_out)
    with parquet.ParquetWriter(target, schema) as writer:
        while held := list(islice(every, _ROWS_AT_A_TIME)):
            arrays = [arrow.array(column, kind) for column, kind in zip(zip(*held, strict=True), kinds, strict=True)]
            writer.write_table(arrow.Table.from_arrays(arrays, schema=schema))


def _write_coco(journal: Path, target: Path, left_out: set[str]) -> None:
    """Write images, annotations and categories, in two passes. `category_id` is the model's own `class_id`."""
    labels: dict[int, str] = {}
    with target.open("wb") as file:
        file.write(b'{"images":[')
        images = (
            {"id": number, "file_name": line["file"], "width": line["width"], "height": line["height"]}
            for number, line in _answered(journal)
        )
        _write_list(file, images)
        file.write(b'],"annotations":[')
        _write_list(file, _annotations(journal, labels, left_out))
        file.write(b'],"categories":[')
        _write_list(file, ({"id": class_id, "name": labels[class_id]} for class_id in sorted(labels)))
        file.write(b"]}\n")


def _answered(journal: Path) -> Iterator[tuple[int, Line]]:
    yield from enumerate((line for line in read_lines(journal) if "error" not in line), 1)


def _annotations(journal: Path, labels: dict[int, str], left_out: set[str]) -> Iterator[dict[str, Any]]:
    number = 0
    for image_id, line in _answered(journal):
        check_boxes(line)
        left_out |= line.keys() - _IN_LINE
        for found in line["detections"]:
            left_out |= found.keys() - _IN_COCO
            number += 1
            labels[found["class_id"]] = found["label"]
            annotation = {"id": number, "image_id": image_id, "category_id": found["class_id"], "score": found["score"]}
            if "box" in found:
                box = found["box"]
                width, height = box["x2"] - box["x1"], box["y2"] - box["y1"]
                annotation |= {
                    "bbox": [box["x1"], box["y1"], round(width, 2), round(height, 2)],
                    "area": round(width * height, 2),
                }
            if "keypoints" in found:  # Their 1 says that a point is there; the evaluation does not read it.
                annotation["keypoints"] = [value for at in found["keypoints"] for value in (at["x"], at["y"], 1)]
                annotation["num_keypoints"] = len(found["keypoints"])
            # Fewer than three points enclose nothing, and COCO's readers take four numbers for a box.
            outlines = [each for each in (*(found.get("segments") or ()), found.get("corners", ())) if len(each) > 2]
            mask = found.get("mask") or [list(chain.from_iterable(outline)) for outline in outlines]
            if mask:
                annotation |= {"segmentation": mask, "area": _area(mask)}
            yield annotation | {"iscrowd": 0}


def _area(segmentation: Mapping[str, Any] | Sequence[Sequence[float]]) -> float:
    """Return the pixels of a mask, or the area within polygons, each [x, y, x, y, ...]."""
    if not isinstance(segmentation, Mapping):
        outlines = [[*zip(each[::2], each[1::2], strict=True)] for each in segmentation]
        sides = (zip(each, (*each[1:], each[0]), strict=True) for each in outlines)
        return round(sum(abs(sum(x * v - u * y for (x, y), (u, v) in of_one)) for of_one in sides) / 2, 2)
    return float(sum(run_lengths(segmentation["counts"])[1::2]))


def run_lengths(text: str) -> list[int]:
    """Read a mask's `counts` as pycocotools writes them: letters of five bits, each count after the third as the
    difference to the one before the last.
    """
    counts: list[int] = []
    value = bits = 0
    for letter in text.encode():
        value |= (letter - 48 & 0x1F) << bits
        bits += 5
        if not letter - 48 & 0x20:
            value -= (letter - 48 & 0x10) << bits - 4
            counts.append(value + (counts[-2] if len(counts) > 2 else 0))
            value = bits = 0
    return counts


def _write_list(file: IO[bytes], documents: Iterator[dict[str, Any]]) -> None:
    for number, document in enumerate(documents):
        file.write((b",\n" if number else b"\n") + orjson.dumps(document))


_WRITERS: dict[str, Callable[[Path, Path, set[str]], None]] = {
    ".csv": _write_csv,
    ".parquet": _write_parquet,
    COCO: _write_coco,
}
