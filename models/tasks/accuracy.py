"""Accuracy of answers in the form of `PixelModel.postprocess`: top-1 and mean average precision."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from models.contract.measures import Accuracy, Answer
from models.contract.model import Array, Options

_CORNERS = ("x1", "y1", "x2", "y2")
_IOU = 0.5


class Boxes(NamedTuple):
    """Objects of one image: boxes float32 [m, 4] (x1, y1, x2, y2, pixels), classes int64 [m], scores float32 [m]."""

    boxes: Array
    classes: Array
    scores: Array


class Top1(Accuracy):
    """The share of images whose class comes first in the answer. The truth is a class's number."""

    name = "top1"
    loss_limit = 0.01

    def of(self, truth: Sequence[Any], answers: Sequence[Answer]) -> float:
        return float(np.mean([self.truth(answer) == right for answer, right in zip(answers, truth, strict=True)]))

    def truth(self, answer: Answer) -> Any:
        return answer["classes"][0]["class_id"]


class MeanAveragePrecision(Accuracy):
    """Mean over the classes present of the average precision at IoU 0.5; NaN without objects. The truth is Boxes."""

    name = "map50"
    loss_limit = 0.02
    options = Options(score_threshold=0.001)  # Precision is an average over all thresholds.

    def of(self, truth: Sequence[Any], answers: Sequence[Answer]) -> float:
        found = [as_boxes(answer["detections"]) for answer in answers]
        classes = {int(class_id) for image in truth for class_id in image.classes}
        each = [average_precision(truth, found, class_id) for class_id in classes]
        return float(np.mean(each)) if each else np.nan

    def truth(self, answer: Answer) -> Boxes:
        """Return the objects over the default threshold."""
        return as_boxes([one for one in answer["detections"] if one["score"] >= Options().score_threshold])


def as_boxes(detections: Sequence[Answer]) -> Boxes:
    """Convert the detections of an answer."""
    return Boxes(
        np.array([[d["box"][side] for side in _CORNERS] for d in detections], dtype=np.float32).reshape(-1, 4),
        np.array([d["class_id"] for d in detections], dtype=np.int64),
        np.array([d["score"] for d in detections], dtype=np.float32),
    )


def average_precision(truth: Sequence[Boxes], found: Sequence[Boxes], class_id: int) -> float:
    """Compute the average precision of a class, interpolated at 101 recalls as COCO does; NaN if the class is absent.

    By descending score, each box takes the free true box it overlaps most; below an overlap of 0.5 it is wrong.
    """
    total = sum(int((image.classes == class_id).sum()) for image in truth)
    scores: list[float] = []
    right: list[bool] = []
    for true, boxes in zip(truth, found, strict=True):
        mine = boxes.classes == class_id
        order = np.argsort(-boxes.scores[mine], kind="stable")
        areas = overlaps(boxes.boxes[mine][order], true.boxes[true.classes == class_id])
        scores.extend(boxes.scores[mine][order].tolist())
        for row in areas:
            best = int(row.argmax()) if row.size else 0
            hit = bool(row.size and row[best] >= _IOU)
            right.append(hit)
            if hit:
                areas[:, best] = 0.0
    if not total:
        return float("nan")
    hits = np.array(right, dtype=bool)[np.argsort(-np.array(scores), kind="stable")].cumsum()
    recall, precision = hits / total, hits / np.arange(1, len(hits) + 1)
    wanted_recalls = np.linspace(0, 1, 101)
    return float(np.mean([precision[recall >= r].max(initial=0.0) for r in wanted_recalls]))


def overlaps(one: Array, other: Array) -> Array:
    """Compute the intersection over union of boxes [m, 4] and [n, 4]: [m, n]."""
    one, other = one[:, None].astype(np.float64), other[None].astype(np.float64)
    sides = (np.minimum(one[..., 2:], other[..., 2:]) - np.maximum(one[..., :2], other[..., :2])).clip(0)
    areas = [(each[..., 2:] - each[..., :2]).prod(-1) for each in (one, other)]
    shared = sides.prod(-1)
    return np.asarray(shared / np.maximum(areas[0] + areas[1] - shared, 1e-9))
