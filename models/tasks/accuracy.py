"""Accuracy of answers: top-1 and mean average precision.

Owns: the measures, over answers in the form of `PixelModel.postprocess`. Must not know who computed them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from models.contract.measures import Accuracy, Answer
from models.contract.model import Array, Options

_CORNERS = ("x1", "y1", "x2", "y2")
_SAME_PLACE = 0.5  # Intersection over union of a detection and its counterpart.


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
        """Compute the share."""
        return float(np.mean([self.truth(answer) == right for answer, right in zip(answers, truth, strict=True)]))

    def truth(self, answer: Answer) -> Any:
        """Return the first class."""
        return answer["classes"][0]["class_id"]

    def agreement(self, expected: Sequence[Answer], answers: Sequence[Answer]) -> dict[str, float]:
        """Compute `top1` and `top5`: shares of equal first classes and of common first five."""
        pairs = [
            [[each["class_id"] for each in answer["classes"]] for answer in pair]
            for pair in zip(expected, answers, strict=True)
        ]
        shared = [len(set(one) & set(other)) / max(1, len(one)) for one, other in pairs]
        return {"top1": float(np.mean([one[0] == other[0] for one, other in pairs])), "top5": float(np.mean(shared))}


class MeanAveragePrecision(Accuracy):
    """Mean over the classes present of the average precision at IoU 0.5; NaN without objects. The truth is Boxes."""

    name = "map50"
    loss_limit = 0.02
    options = Options(score_threshold=0.001)  # Precision is an average over all thresholds.

    def of(self, truth: Sequence[Any], answers: Sequence[Answer]) -> float:
        """Compute the mean."""
        return mean_average_precision(truth, answers, (0.5,))

    def report(self, truth: Sequence[Any], answers: Sequence[Answer]) -> dict[str, float]:
        """Compute this measure, and the mean over COCO's ten IoUs."""
        return {**super().report(truth, answers), "map50_95": mean_average_precision(truth, answers)}

    def truth(self, answer: Answer) -> Boxes:
        """Return the objects over the default threshold."""
        return as_boxes([one for one in answer["detections"] if one["score"] >= Options().score_threshold])

    def agreement(self, expected: Sequence[Answer], answers: Sequence[Answer]) -> dict[str, float]:
        """Compute `boxes`, the share of detections that the other side has too, of the same class and at the same
        place, and `detections`, their number.
        """
        matched = total = 0
        for one, other in zip(expected, answers, strict=True):
            mine, theirs = as_boxes(one["detections"]), as_boxes(other["detections"])
            shared_area = overlaps(mine.boxes, theirs.boxes) * (mine.classes[:, None] == theirs.classes[None])
            matched += int((shared_area.max(axis=1, initial=0) >= _SAME_PLACE).sum())
            matched += int((shared_area.max(axis=0, initial=0) >= _SAME_PLACE).sum())
            total += len(mine.classes) + len(theirs.classes)
        return {"boxes": matched / total if total else 1.0, "detections": float(total) / 2}


def as_boxes(detections: Sequence[Answer]) -> Boxes:
    """Convert the detections of an answer."""
    return Boxes(
        np.array([[d["box"][side] for side in _CORNERS] for d in detections], dtype=np.float32).reshape(-1, 4),
        np.array([d["class_id"] for d in detections], dtype=np.int64),
        np.array([d["score"] for d in detections], dtype=np.float32),
    )


def mean_average_precision(
    truth: Sequence[Boxes], answers: Sequence[Answer], ious: Sequence[float] = tuple(np.arange(0.5, 1, 0.05))
) -> float:
    """Compute the mean of the average precision over the classes present and IoUs (COCO's ten); NaN without objects."""
    found = [as_boxes(answer["detections"]) for answer in answers]
    classes = {int(class_id) for image in truth for class_id in image.classes}
    each = [average_precision(truth, found, class_id, iou) for class_id in classes for iou in ious]
    return float(np.mean(each)) if each else np.nan


def average_precision(truth: Sequence[Boxes], found: Sequence[Boxes], class_id: int, iou: float = 0.5) -> float:
    """Compute the average precision of a class, interpolated at 101 recalls as COCO does; NaN if the class is absent.

    By descending score, each box takes the free true box it overlaps most; below an overlap of `iou` it is wrong.
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
            hit = bool(row.size and row[best] >= iou)
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
