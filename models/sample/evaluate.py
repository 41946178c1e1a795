"""Measures the sample models as they are served: the product's own preprocessing and postprocessing, pictures that no
training saw.

Owns: the pictures as the networks see them, and the measures. Must not know how the networks were trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset

from models.classification import Classifier
from models.detection import Detector
from models.model import Options, PixelModel
from models.sample.loss import iou
from models.sample.pictures import KINDS, classification_picture, detection_picture

CLASSIFIER_SIZE = 224
DETECTOR_SIZE = 640
PHOTO_SIZES = ((500, 375), (640, 480), (375, 500), (800, 600), (400, 400))


class Boxes(NamedTuple):
    """Objects of one picture: boxes float32 [m, 4] (x1, y1, x2, y2, pixels), classes int64 [m], scores float32 [m]."""

    boxes: npt.NDArray[Any]
    classes: npt.NDArray[Any]
    scores: npt.NDArray[Any]


def classifier(weights_file: Path | None = None) -> Classifier:
    """The sample classifier from its weights file; without one, for its preprocessing only."""
    return Classifier.of("resnet50", "resnet50", KINDS, *_origin(weights_file))


def detector(weights_file: Path | None = None, size: int = DETECTOR_SIZE) -> Detector:
    """The sample detector from its weights file; without one, for its preprocessing only. `size`: the input's side."""
    return Detector("yolov8n", "yolov8n", KINDS, *_origin(weights_file), input_shape=(size, size, 3))


def _origin(weights_file: Path | None) -> tuple[str, str | None]:
    return ("sample", str(weights_file)) if weights_file else ("random", None)


def photo_size(index: int) -> tuple[int, int]:
    """(width, height) of held-out picture `index`."""
    return PHOTO_SIZES[index % len(PHOTO_SIZES)]


class ClassificationPictures(Dataset[Any]):
    """(uint8 [size, size, 3], class): at the serving size a photo preprocessed as served, else drawn at `size`."""

    def __init__(self, seed: int, first: int, size: int, difficulty: float = 1.0) -> None:
        self.seed = seed
        self.first = first
        self.size = size
        self.difficulty = difficulty

    def __len__(self) -> int:
        return 1 << 40

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        """Picture `first` + `number`."""
        index = self.first + number
        served = self.size == CLASSIFIER_SIZE
        size = photo_size(index) if served else (self.size, self.size)
        rgb, class_id = classification_picture(self.seed, index, size, self.difficulty)
        pixels = torch.from_numpy(rgb)
        if served:
            pixels = torch.empty(CLASSIFIER_SIZE, CLASSIFIER_SIZE, 3, dtype=torch.uint8)
            classifier().preprocess(torch.from_numpy(rgb), pixels, *size)
        return pixels, class_id


class DetectionPictures(Dataset[Any]):
    """(uint8 [size, size, 3], boxes float32 [m, 4] in its pixels, classes int64 [m]), letterboxed as served.

    At the serving size pictures are as large as photos, below it as large as `size` allows.
    """

    def __init__(self, seed: int, first: int, size: int, zoom: float = 1.0) -> None:
        self.seed = seed
        self.first = first
        self.size = size
        self.zoom = zoom

    def __len__(self) -> int:
        return 1 << 40

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor, Tensor]:
        """Picture `first` + `number`."""
        index = self.first + number
        size = photo_size(index)
        if self.size < DETECTOR_SIZE:
            size = (size[0] * self.size // max(size), size[1] * self.size // max(size))
        rgb, boxes, classes = detection_picture(self.seed, index, size, self.zoom)
        pixels = torch.empty(self.size, self.size, 3, dtype=torch.uint8)
        placement = detector(size=self.size).preprocess(torch.from_numpy(rgb), pixels, *size)
        pad = np.array([placement.pad_x, placement.pad_y] * 2, dtype=np.float32)
        placed = boxes * np.float32(placement.scale) + pad
        return pixels, torch.from_numpy(placed), torch.from_numpy(classes)


def top1(model: Classifier, seed: int, count: int) -> float:
    """The share of the first `count` pictures of `seed` whose class comes first in the answer."""
    served = Served(model)
    right = 0
    for index in range(count):
        rgb, class_id = classification_picture(seed, index, photo_size(index))
        right += served.predict(rgb)["classes"][0]["class_id"] == class_id
    return right / count


def map50(model: Detector, seed: int, count: int) -> float:
    """Mean over the classes of the average precision at IoU 0.5, on the first `count` pictures of `seed`."""
    served = Served(model, Options(score_threshold=0.001))
    truth, found = [], []
    for index in range(count):
        rgb, boxes, classes = detection_picture(seed, index, photo_size(index))
        truth.append(Boxes(boxes, classes, np.ones(len(classes), dtype=np.float32)))
        found.append(as_boxes(served.predict(rgb)["detections"]))
    precisions = [average_precision(truth, found, class_id) for class_id in range(len(KINDS))]
    return float(np.nanmean(precisions))


class Served:
    """A model in one process, picture by picture: eager, float32."""

    def __init__(self, model: PixelModel, options: Options | None = None) -> None:
        self.model = model
        self.options = options or Options()
        self.network = model.network()

    @torch.inference_mode()
    def predict(self, rgb: npt.NDArray[np.uint8]) -> dict[str, Any]:
        """The answer to one picture, uint8 [height, width, 3]."""
        height, width = rgb.shape[:2]
        pixels = torch.empty(1, *self.model.input_shape, dtype=torch.uint8)
        placement = self.model.preprocess(torch.from_numpy(rgb), pixels[0], width, height)
        outputs = [output.numpy() for output in self.network(pixels)]
        reduced = self.model.reduce(outputs, 0, self.options)
        return self.model.postprocess(reduced, placement, self.options)


def as_boxes(detections: list[dict[str, Any]]) -> Boxes:
    """The detections of an answer."""
    sides = ("x1", "y1", "x2", "y2")
    return Boxes(
        np.array([[d["box"][side] for side in sides] for d in detections], dtype=np.float32).reshape(-1, 4),
        np.array([d["class_id"] for d in detections], dtype=np.int64),
        np.array([d["score"] for d in detections], dtype=np.float32),
    )


def average_precision(truth: Sequence[Boxes], found: Sequence[Boxes], class_id: int) -> float:
    """Average precision of a class at IoU 0.5, interpolated at 101 recalls as COCO does; NaN where the class is absent.

    By descending score, each box takes the free true box it overlaps most; where that is less than 0.5 it is wrong.
    """
    total = sum(int((picture.classes == class_id).sum()) for picture in truth)
    scores: list[float] = []
    right: list[bool] = []
    for true, boxes in zip(truth, found, strict=True):
        wanted = torch.from_numpy(true.boxes[true.classes == class_id])
        mine = boxes.classes == class_id
        order = np.argsort(-boxes.scores[mine], kind="stable")
        overlaps = iou(torch.from_numpy(boxes.boxes[mine][order]).unsqueeze(1), wanted.unsqueeze(0)).numpy()
        scores.extend(boxes.scores[mine][order].tolist())
        for row in overlaps:
            best = int(row.argmax()) if row.size else 0
            hit = bool(row.size and row[best] >= 0.5)
            right.append(hit)
            if hit:
                overlaps[:, best] = 0.0
    if not total:
        return float("nan")
    hits = np.array(right, dtype=bool)[np.argsort(-np.array(scores), kind="stable")].cumsum()
    recall, precision = hits / total, hits / np.arange(1, len(hits) + 1)
    wanted_recalls = np.linspace(0, 1, 101)
    return float(np.mean([precision[recall >= r].max(initial=0.0) for r in wanted_recalls]))
