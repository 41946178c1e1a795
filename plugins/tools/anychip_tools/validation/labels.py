"""Accuracy on images with labels: a folder for each class, or COCO's JSON.

Owns: reading labels, and the way of labelled images through an executable. Must not know engines.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from app.arguments import CommandError
from app.decoder.decoder import decode_into
from app.images.header import ImageError, read_header
from backends import Executable
from models import PixelModel, Placement
from models.tasks.accuracy import Boxes

SUFFIXES = {".jpg", ".jpeg", ".png", ".webp", ".bmp"}


@dataclass(frozen=True)
class Labelled:
    """File and its content: a class's number, or Boxes in pixels of the image."""

    file: Path
    truth: Any


def images_in(folder: Path) -> list[Path]:
    """Return the image files below a folder, in order. Raises CommandError if there is none."""
    files = sorted(path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES)
    if not files:
        raise CommandError(f"there is no image in {folder}")
    return files


def by_folder(folder: Path, labels: Sequence[str]) -> list[Labelled]:
    """Read images from folders that are named by a class's label or number. Raises CommandError."""
    numbers = {label.lower(): number for number, label in enumerate(labels)}
    found = []
    for path in images_in(folder):
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


def measured_accuracy(
    model: PixelModel, executable: Executable, images: Sequence[Labelled], advance: Callable[[int], object]
) -> dict[str, float]:
    """Measure top-1, or mAP at IoU 0.5 and over 0.5 to 0.95 like COCO. `advance`: takes the images done.

    Leave out images that cannot be read. Raises BackendError, and CommandError if no image can be read.
    """
    accuracy = model.accuracy
    assert accuracy is not None
    truth: list[Any] = []
    answers: list[dict[str, Any]] = []
    for labelled, pixels, placements in _batches(model, images, executable.batch_sizes[-1]):
        outputs = executable.run(pixels)
        for row, (each, placement) in enumerate(zip(labelled, placements, strict=True)):
            truth.append(each.truth)
            answers.append(model.postprocess(model.reduce(outputs, row, accuracy.options), placement, accuracy.options))
        advance(len(labelled))
    if not truth:
        raise CommandError("none of the labelled images can be read")
    return {**accuracy.report(truth, answers), "images": float(len(truth))}


def _batches(
    model: PixelModel, images: Sequence[Labelled], size: int
) -> Iterator[tuple[list[Labelled], npt.NDArray[np.uint8], list[Placement]]]:
    pixels = torch.zeros((size, *model.input_shape), dtype=torch.uint8)
    labelled: list[Labelled] = []
    placements: list[Placement] = []
    for each in images:
        try:
            encoded = each.file.read_bytes()
            placement = decode_into(model, encoded, read_header(encoded), pixels[len(labelled)])
        except (ImageError, OSError):
            continue
        labelled.append(each)
        placements.append(placement)
        if len(labelled) == size:
            yield labelled, pixels.numpy(), placements
            labelled, placements = [], []
    if labelled:
        yield labelled, pixels.numpy(), placements
