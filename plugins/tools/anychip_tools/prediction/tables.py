"""Conversion of a journal of outcomes to CSV, Parquet or COCO JSON.

Owns: the columns and the COCO form. Must not hold all of the results: everything is written as it is read.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import orjson

from anychip_base.extras import how_to_install
from anychip_tools.prediction.outcomes import Line, read_lines
from app.arguments import CommandError

LINES = ".jsonl"
"""Suffix of a file that is a journal itself."""
COLUMNS = ("file", "width", "height", "label", "class_id", "score", "x1", "y1", "x2", "y2", "error")
"""Columns of a table with one row a box, class, area (its share is the score) or value. An image with none, or one
that failed, has one row without them."""

_ROWS_AT_A_TIME = 20_000


def convert(journal: Path, target: Path) -> None:
    """Write `target` from a journal, in the form of its suffix. Raises CommandError, OSError."""
    _WRITERS[target.suffix.lower()](journal, target)


def check_format(output: Path) -> None:
    """Check before the work that this file can be written here. Raises CommandError."""
    suffix = output.suffix.lower()
    if suffix not in (LINES, *_WRITERS):
        raise CommandError(f"{output} must end with {', '.join((LINES, *_WRITERS))}")
    if suffix == ".parquet":
        try:
            import pyarrow.parquet  # noqa: F401
        except ImportError:
            raise CommandError(f"Parquet needs pyarrow: {how_to_install('parquet')}; or write .csv") from None


def rows(line: Line) -> Iterator[tuple[Any, ...]]:
    """Yield the rows of an image, in the order of `COLUMNS`."""
    head = (line["file"], line.get("width"), line.get("height"))
    values = [{"label": name, "score": value} for name, value in line.get("values", {}).items()]
    found = line.get("detections") or line.get("classes") or line.get("areas") or values
    for each in found:
        box = each.get("box", {})
        places = tuple(box.get(name) for name in ("x1", "y1", "x2", "y2"))
        score = each.get("score", each.get("share"))
        yield (*head, each["label"], each.get("class_id"), score, *places, None)
    if not found:
        yield (*head, None, None, None, None, None, None, None, line.get("error"))


def _write_csv(journal: Path, target: Path) -> None:
    with target.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for line in read_lines(journal):
            writer.writerows(rows(line))


def _write_parquet(journal: Path, target: Path) -> None:
    import pyarrow as arrow
    from pyarrow import parquet

    text, whole, number = arrow.string(), arrow.int32(), arrow.float64()
    kinds = (text, whole, whole, text, whole, number, number, number, number, number, text)
    schema = arrow.schema(list(zip(COLUMNS, kinds, strict=True)))
    with parquet.ParquetWriter(target, schema) as writer:
        held: list[tuple[Any, ...]] = []

        def flush() -> None:
            if held:
                columns = [list(column) for column in zip(*held, strict=True)]
                arrays = [arrow.array(column, kind) for column, kind in zip(columns, kinds, strict=True)]
                writer.write_table(arrow.Table.from_arrays(arrays, schema=schema))
                held.clear()

        for line in read_lines(journal):
            held.extend(rows(line))
            if len(held) >= _ROWS_AT_A_TIME:
                flush()
        flush()


def _write_coco(journal: Path, target: Path) -> None:
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
        _write_list(file, _annotations(journal, labels))
        file.write(b'],"categories":[')
        _write_list(file, ({"id": class_id, "name": labels[class_id]} for class_id in sorted(labels)))
        file.write(b"]}\n")


def _answered(journal: Path) -> Iterator[tuple[int, Line]]:
    yield from enumerate((line for line in read_lines(journal) if "error" not in line), 1)


def _annotations(journal: Path, labels: dict[int, str]) -> Iterator[dict[str, Any]]:
    from anychip_tools.prediction.drawing import polygons

    number = 0
    for image_id, line in _answered(journal):
        if "detections" not in line:
            raise CommandError("COCO JSON holds boxes, and this model answers with none: write .jsonl or .csv")
        for found in line["detections"]:
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
            outlines = [[value for point in outline for value in point] for outline in polygons(found)]
            yield annotation | {"iscrowd": 0, **({"segmentation": outlines} if outlines else {})}


def _write_list(file: IO[bytes], documents: Iterator[dict[str, Any]]) -> None:
    for number, document in enumerate(documents):
        file.write((b",\n" if number else b"\n") + orjson.dumps(document))


_WRITERS: dict[str, Callable[[Path, Path], None]] = {
    ".csv": _write_csv,
    ".parquet": _write_parquet,
    ".json": _write_coco,
}
