"""Measurement of the sample models as they are served: the product's preprocessing and postprocessing, images that
no training saw.

Owns: the images as the networks see them. Must not know how the networks were trained.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset

from benchmarks.sample_training.generator import KINDS, classification_image, detection_image
from models.classifiers import Classifier
from models.contract.model import Options
from models.contract.pixel_model import PixelModel
from models.tasks.accuracy import Boxes, MeanAveragePrecision, Top1
from models.yolo.model import YOLO

CLASSIFIER_SIZE = 224
DETECTOR_SIZE = 640
PHOTO_SIZES = ((500, 375), (640, 480), (375, 500), (800, 600), (400, 400))


def classifier(weights_file: Path | None = None) -> Classifier:
    """Open the sample classifier from its weights file; without one, for its preprocessing only."""
    return Classifier.of("resnet50", "resnet50", KINDS, *_origin(weights_file))


def detector(weights_file: Path | None = None, size: int = DETECTOR_SIZE) -> YOLO:
    """Open the sample detector from its weights file; without one, for its preprocessing only. `size`: input's side."""
    return YOLO.of("yolov8n", "yolov8n", KINDS, *_origin(weights_file), size=(size, size))


def _origin(weights_file: Path | None) -> tuple[str, str | None]:
    return ("sample", str(weights_file)) if weights_file else ("random", None)


def photo_size(index: int) -> tuple[int, int]:
    """Return (width, height) of held-out image `index`."""
    return PHOTO_SIZES[index % len(PHOTO_SIZES)]


class ClassificationImages(Dataset[Any]):
    """Pairs (uint8 [size, size, 3], class): at the serving size a photo preprocessed as served, else drawn."""

    def __init__(self, seed: int, first: int, size: int, difficulty: float = 1.0) -> None:
        self.seed = seed
        self.first = first
        self.size = size
        self.difficulty = difficulty

    def __len__(self) -> int:
        return 1 << 40

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        """Return image `first` + `number`."""
        index = self.first + number
        served = self.size == CLASSIFIER_SIZE
        size = photo_size(index) if served else (self.size, self.size)
        rgb, class_id = classification_image(self.seed, index, size, self.difficulty)
        pixels = torch.from_numpy(rgb)
        if served:
            pixels = torch.empty(CLASSIFIER_SIZE, CLASSIFIER_SIZE, 3, dtype=torch.uint8)
            classifier().preprocess(torch.from_numpy(rgb), pixels, *size)
        return pixels, class_id


class DetectionImages(Dataset[Any]):
    """Triples (uint8 [size, size, 3], boxes float32 [m, 4] in its pixels, classes int64 [m]), letterboxed as served.

    At the serving size images are as large as photos, below it as large as `size` allows.
    """

    def __init__(self, seed: int, first: int, size: int, zoom: float = 1.0) -> None:
        self.seed = seed
        self.first = first
        self.size = size
        self.zoom = zoom

    def __len__(self) -> int:
        return 1 << 40

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return image `first` + `number`."""
        index = self.first + number
        size = photo_size(index)
        if self.size < DETECTOR_SIZE:
            size = (size[0] * self.size // max(size), size[1] * self.size // max(size))
        rgb, boxes, classes = detection_image(self.seed, index, size, self.zoom)
        pixels = torch.empty(self.size, self.size, 3, dtype=torch.uint8)
        placement = detector(size=self.size).preprocess(torch.from_numpy(rgb), pixels, *size)
        pad = np.array([placement.pad_x, placement.pad_y] * 2, dtype=np.float32)
        placed = boxes * np.float32(placement.scale) + pad
        return pixels, torch.from_numpy(placed), torch.from_numpy(classes)


def top1(model: Classifier, seed: int, count: int) -> float:
    """Measure top-1 on the first `count` images of `seed`."""
    served, truth, answers = Served(model), [], []
    for index in range(count):
        rgb, class_id = classification_image(seed, index, photo_size(index))
        truth.append(class_id)
        answers.append(served.predict(rgb))
    return Top1().of(truth, answers)


def map50(model: YOLO, seed: int, count: int) -> float:
    """Measure the mAP on the first `count` images of `seed`."""
    served, truth, answers = Served(model, MeanAveragePrecision.options), [], []
    for index in range(count):
        rgb, boxes, classes = detection_image(seed, index, photo_size(index))
        truth.append(Boxes(boxes, classes, np.ones(len(classes), dtype=np.float32)))
        answers.append(served.predict(rgb))
    return MeanAveragePrecision().of(truth, answers)


class Served:
    """Model in one process, image by image: eager, float32."""

    def __init__(self, model: PixelModel, options: Options | None = None) -> None:
        self.model = model
        self.options = options or Options()
        self.network = model.network()

    @torch.inference_mode()
    def predict(self, rgb: npt.NDArray[np.uint8]) -> dict[str, Any]:
        """Answer one image, uint8 [height, width, 3]."""
        height, width = rgb.shape[:2]
        pixels = torch.empty(1, *self.model.input_shape, dtype=torch.uint8)
        placement = self.model.preprocess(torch.from_numpy(rgb), pixels[0], width, height)
        outputs = [output.numpy() for output in self.network(pixels)]
        reduced = self.model.reduce(outputs, 0, self.options)
        return self.model.postprocess(reduced, placement, self.options)
