"""Accuracy on images with labels: a folder for each class, or COCO's JSON.

Owns: reading labels, and the way of labelled images through an executable. Must not know engines.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from app.arguments import CommandError
from app.images.header import ImageError
from app.precision.gate import outputs_of
from app.precision.probes import images_in, seen
from backends import Executable
from backends.contract.backend import Pixels
from models import PixelModel, Placement
from models.tasks.accuracy import Boxes


@dataclass(frozen=True)
class Labelled:
    """File and its content: a class's number, or Boxes in pixels of the image."""

    file: Path
    truth: Any


def found_in(folder: Path) -> list[Path]:
    """Return the image files below a folder, in order. Raises CommandError if there is none."""
    if files := images_in(folder):
        return files
    raise CommandError(f"there is no image in {folder}")


def by_folder(folder: Path, labels: Sequence[str]) -> list[Labelled]:
    """Read images from folders that are named by a class's label or number. Raises CommandError."""
    numbers = {label.lower(): number for number, label in enumerate(labels)}
    found = []
    for path in found_in(folder):
        name = path.relative_to(folder).parts[0]
        number = numbers.get(name.lower(), int(name) if name.isdigit() and int(name) < len(labels) else None)
        if number is None or path.parent == folder:
            raise CommandError(f"{path} is not in a folder named by one of the {len(labels)} classes, or its number")
        found.append(Labelled(path, number))
    return found


def of_coco(file: Path, folder: Path, labels: Sequence[str]) -> list[Labelled]:
    """Read COCO's JSON, with the images in `folder`; match categories by name. Raises CommandError."""
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
        names = {each["id"]: each["name"].lower() for each in document["categories"]}
        files = {each["id"]: folder / each["file_name"] for each in document["images"]}
        annotations = document["annotations"]
    except (KeyError, TypeError, ValueError) as error:
        raise CommandError(f"{file} is not COCO's JSON: {type(error).__name__}: {error}") from None
    numbers = {label.lower(): number for number, label in enumerate(labels)}
    objects: dict[Any, list[tuple[int, list[float]]]] = {image: [] for image in files}
    for each in annotations:
        number = numbers.get(names.get(each["category_id"], ""))
        if number is not None and not each.get("iscrowd") and each["image_id"] in objects:
            x, y, width, height = each["bbox"]
            objects[each["image_id"]].append((number, [x, y, x + width, y + height]))
    if not any(objects.values()):
        raise CommandError(f"{file} has no object of a class that the model knows")
    found = []
    for image, there in objects.items():
        boxes = np.array([box for _, box in there], dtype=np.float32).reshape(-1, 4)
        classes = np.array([number for number, _ in there], dtype=np.int64)
        found.append(Labelled(files[image], Boxes(boxes, classes, np.ones(len(there), dtype=np.float32))))
    return found


def measured_accuracy(model: PixelModel, executable: Executable, images: Sequence[Labelled]) -> dict[str, float]:
    """Measure top-1, or mAP at IoU 0.5 and over 0.5 to 0.95 like COCO.

    Leave out images that cannot be read. Raises BackendError, and CommandError if no image can be read.
    """
    accuracy = model.accuracy
    assert accuracy is not None
    truth: list[Any] = []
    answers: list[dict[str, Any]] = []
    size = executable.batch_sizes[-1]
    for first in range(0, len(images), size):
        read = list(_read(model, images[first : first + size]))
        if not read:
            continue
        outputs = outputs_of(executable.run, np.stack([pixels for _, pixels, _ in read]), size)
        for row, (known, _, placement) in enumerate(read):
            truth.append(known)
            answers.append(model.postprocess(model.reduce(outputs, row, accuracy.options), placement, accuracy.options))
    if not truth:
        raise CommandError("none of the labelled images can be read")
    return {**accuracy.report(truth, answers), "images": float(len(truth))}


def _read(model: PixelModel, images: Sequence[Labelled]) -> Iterator[tuple[Any, Pixels, Placement]]:
    for each in images:
        with suppress(ImageError, OSError):
            yield each.truth, *seen(model, each.file.read_bytes())
