"""Detection: instances with a box, a score and a class; the other tasks of instances add to it.

Owns: how candidates become instances, the answer's form, and what the precision gate measures of it. Must not know how
a network is stored or how its outputs became candidates (models.exports.layouts).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np

from models.contract.measures import Limits, divided, in_deviations, scale_error
from models.contract.model import Array, Options, OutputSpec, Placement
from models.contract.resize import Fit
from models.contract.task_adapter import Takes, TaskAdapter
from models.tasks.accuracy import MeanAveragePrecision, as_boxes, overlaps
from models.tasks.instances import MAX_CANDIDATES, suppress

Found = dict[str, Array]
"""Instances of an image: `boxes` float64 [k, 4] in its pixels, `scores`, `classes`, and what the task adds."""

LIMITS: Limits = {
    "fp32": {"class": 0.0, "score": 0.002, "box": 0.05, "scale": 0.002, "missed": 0.0},
    "fp16": {"class": 0.0, "score": 0.01, "box": 0.2, "scale": 0.005, "missed": 0.0},
    "bf16": {"class": 0.02, "score": 0.1, "box": 0.6, "scale": 0.02, "missed": 0.05},
    "int8": {"class": 0.05, "score": 0.3, "box": 2.0, "scale": 0.04, "missed": 0.1},
}
_EXTRA_LIMITS = {"fp32": 0.01, "fp16": 0.05, "bf16": 0.5, "int8": 1.0}
LIMITS_WITH_EXTRAS: Limits = {name: {**limits, "extra": _EXTRA_LIMITS[name]} for name, limits in LIMITS.items()}
"""Of tasks that add to boxes."""

_ANCHORS = 100  # Per image, those with the highest scores: the others are never part of an answer.
_SAME_PLACE = 0.7  # Intersection over union of a detection and its counterpart.
_USUAL_STRIDE = 16  # Where the anchors are not known.


class Detect(TaskAdapter):
    """Candidates to instances. `extras`: the names of the outputs beside boxes, scores and classes, those of each
    candidate first.
    """

    finds = "objects"
    takes: ClassVar[Takes] = "boxes"
    tiled = True
    limits = LIMITS
    accuracy = MeanAveragePrecision()
    extras: ClassVar[tuple[str, ...]] = ()

    @property
    def outputs(self) -> tuple[str, ...]:
        """Boxes, scores, classes, and what the task adds."""
        return ("distances" if self.file.distances else "boxes", "scores", "classes", *self.extras)

    def reduce(self, outputs: Sequence[Array], options: Options) -> tuple[Array, ...]:
        """Candidates by descending score: boxes [k, 4], scores [k], classes [k], and what the task wants."""
        boxes, scores, classes, *others = outputs
        # Rows that the network has filled up with zeros are none, whatever the threshold.
        chosen = np.flatnonzero(scores > max(options.score_threshold, 0.0))
        chosen = chosen[np.argsort(-scores[chosen], kind="stable")[:MAX_CANDIDATES]]
        return self._boxes(boxes, chosen), scores[chosen], classes[chosen], *self.kept_extras(others, chosen)

    def _boxes(self, boxes: Array, chosen: Array) -> Array:
        """Boxes of candidates in pixels of the input.

        Distances are in strides, and places are computed here: a low-precision engine then errs relative to the size
        of a box, not to its place in the image (bfloat16 counts in steps of 4 beyond 512).
        """
        if not self.file.distances:
            return boxes[chosen]
        centres, strides = _anchors(self.file.size, self.file.strides)
        near, far = centres[chosen] - boxes[chosen, :2], centres[chosen] + boxes[chosen, 2:]
        corners: Array = np.concatenate((near, far), axis=1, dtype=np.float32) * strides[chosen, None]
        return corners

    def kept_extras(self, others: Sequence[Array], chosen: Array) -> list[Array]:
        """What is sent to the server of an image's further outputs, for the chosen candidates."""
        return [other[chosen] for other in others[: len(self.extras)]]

    def keep(self, outputs: Sequence[Array], options: Options) -> Array:
        """Indices of the candidates that remain, by descending score; `outputs` are by descending score."""
        boxes, scores, classes = outputs[:3]
        return suppress(boxes, scores, classes, options.iou_threshold, options.max_detections)

    def locate(self, outputs: Sequence[Array], kept: Array, fit: Fit) -> Found:
        """The boxes of the instances that were kept, and what the task adds."""
        return {"boxes": fit.boxes(outputs[0][kept].astype(np.float64))}

    def describe(self, found: Found, fit: Fit, options: Options) -> Sequence[Mapping[str, Any] | None]:
        """What each instance's entry has beside label, score and box; None: it is no instance after all."""
        return [{} for _ in found["scores"]]

    def found(self, outputs: Sequence[Array], placement: Placement, options: Options) -> tuple[Found, Array, Fit]:
        """The instances, their indices among the candidates, and where the image lies."""
        if self.file.suppressed:
            kept = np.arange(min(len(outputs[1]), max(0, options.max_detections)))
        else:
            kept = self.keep(outputs, options)
        fit = self.file.resize.fit(placement)
        located = self.locate(outputs, kept, fit)
        return {"scores": outputs[1][kept], "classes": outputs[2][kept].astype(np.int64), **located}, kept, fit

    def postprocess(self, outputs: Sequence[Array], placement: Placement, options: Options) -> dict[str, Any]:
        """Instances by descending score, all coordinates in pixels of the image as displayed."""
        found, _, fit = self.found(outputs, placement, options)
        detections = [
            {
                "label": self.file.label(class_id),
                "class_id": class_id,
                "score": score,
                "box": dict(zip(("x1", "y1", "x2", "y2"), box, strict=True)),
                **more,
            }
            for class_id, score, box, more in zip(
                found["classes"].tolist(),
                found["scores"].astype(np.float64).round(5).tolist(),
                found["boxes"].round(2).tolist(),
                self.describe(found, fit, options),
                strict=True,
            )
            if more is not None
        ]
        return {"detections": detections}

    @property
    def answers(self) -> tuple[OutputSpec, ...]:
        """Instances by descending score; of a batch, images with fewer are filled up with zeros."""
        return (
            OutputSpec("boxes", "FP32", (-1, -1, 4)),
            OutputSpec("scores", "FP32", (-1, -1)),
            OutputSpec("classes", "INT32", (-1, -1)),
            OutputSpec("num_detections", "INT32", (-1,)),
        )

    def tensors(self, outputs: Sequence[Array], placement: Placement, options: Options) -> dict[str, Array]:
        """Boxes float32 [k, 4] as x1, y1, x2, y2 in pixels of the image, scores [k], classes [k], their number []."""
        found, kept, _ = self.found(outputs, placement, options)
        return {
            "boxes": found["boxes"].astype(np.float32),
            "scores": found["scores"].astype(np.float32),
            "classes": found["classes"].astype(np.int32),
            "num_detections": np.array(len(kept), np.int32),
            **self.extra_tensors(found, outputs[0][kept]),
        }

    def extra_tensors(self, found: Found, boxes: Array) -> dict[str, Array]:
        """The tensors that the task adds to `answers`. `boxes`: of the instances, in pixels of the input."""
        return {}

    def measures(self, expected: Sequence[Array], outputs: Sequence[Array]) -> dict[str, float]:
        """Errors of boxes [n, anchors, 4], scores and classes [n, anchors], on the anchors with the highest scores.

        `class`: score-weighted fraction of anchors with a different class; `score`: the largest error of a score;
        `box`: the largest error of a side of a box, in strides, weighted by the score up to the default threshold;
        `scale`: how far the best common factor of all boxes is from 1; `missed`: fraction of detections that only one
        side has; `extra`: the largest error of what the task adds, in standard deviations of each.
        """
        expected, outputs = (self._in_order(each) for each in (expected, outputs))
        rows = np.arange(len(expected[0]))[:, None]
        top = np.argsort(-expected[1], axis=1)[:, :_ANCHORS]
        (boxes, scores, classes), (given_boxes, given_scores, given_classes) = (
            tuple(output[rows, top].astype(np.float64) for output in (each[0] / self._strides(), *each[1:3]))
            for each in (expected, outputs)
        )
        threshold = Options().score_threshold
        answered = scores > threshold
        # The box of a low score means little, so its error counts in proportion to the score.
        errors = np.abs(boxes - given_boxes).max(2) * np.minimum(1, scores / threshold)
        measured = {
            "class": float(divided((scores * (classes != given_classes)).sum(), scores.sum())),
            "score": float(np.abs(scores - given_scores).max()),
            "box": float(errors.max()),
            "scale": scale_error(*((each[answered] if answered.any() else each) for each in (boxes, given_boxes))),
            "missed": self._missed(expected, outputs),
        }
        if self.extras:
            # Only anchors that the reference believes in: extras of all others are noise.
            sure = (expected[1] > threshold) & (expected[2] == outputs[2])
            pairs = [(expected[3][sure], outputs[3][sure]), *zip(expected[4:], outputs[4:], strict=True)]
            measured["extra"] = max([in_deviations(*pair) for pair in pairs if pair[0].size], default=0.0)
        return measured

    def _strides(self) -> Array:
        """Pixels of the input that an error of 1 in a box stands for, float32 [anchors, 1] or [1]."""
        height, width = self.file.size
        if self.file.distances:
            return np.ones(1, np.float32)
        each = [np.full((height // s) * (width // s), s, np.float32) for s in self.file.strides]
        return np.concatenate(each)[:, None] if each else np.full(1, _USUAL_STRIDE, np.float32)

    def _in_order(self, outputs: Sequence[Array]) -> Sequence[Array]:
        """Outputs with the rows of self-suppressing networks in one order, by class, then by place: rows of equal
        scores may change places.
        """
        if not self.file.suppressed:
            return outputs
        boxes, scores, classes = outputs[:3]
        believed = scores > Options().score_threshold
        keys = np.where(believed, classes * 1e6 + boxes[..., :2].round().sum(axis=2), 1e12)
        order = np.argsort(keys, axis=1, kind="stable")
        rows = np.arange(len(boxes))[:, None]
        cut = np.take_along_axis(believed, order, axis=1)
        of_rows = 3 + bool(self.extras)

        def ordered(each: Array) -> Array:
            return np.where(cut.reshape(*cut.shape, *[1] * (each.ndim - cut.ndim)), each[rows, order], 0)

        return [*(ordered(each) for each in outputs[:of_rows]), *outputs[of_rows:]]

    def _missed(self, expected: Sequence[Array], outputs: Sequence[Array]) -> float:
        """Fraction of detections (score over 0.4) whose counterpart (score over 0.15, same class) the other side lacks.

        The two thresholds differ so that rounding does not decide.
        """
        height, width = self.file.size

        def boxes(given: Sequence[Array], row: int, threshold: float) -> Any:
            options = Options(score_threshold=threshold)
            reduced = self.reduce([each[row] for each in given], options)
            return as_boxes(self.postprocess(reduced, Placement(width, height), options)["detections"])

        missed = sure = 0
        for one, other in ((expected, outputs), (outputs, expected)):
            for row in range(len(one[0])):
                mine, theirs = boxes(one, row, 0.4), boxes(other, row, 0.15)
                shared = overlaps(mine.boxes, theirs.boxes) * (mine.classes[:, None] == theirs.classes[None])
                sure += len(mine.classes)
                missed += int((shared.max(axis=1, initial=0) < _SAME_PLACE).sum())
        return missed / max(1, sure)


@lru_cache(maxsize=8)
def _anchors(size: tuple[int, int], strides: tuple[int, ...]) -> tuple[Array, Array]:
    """Centres float32 [anchors, 2] as (x, y) in strides, and strides float32 [anchors], row by row."""
    centres, each = [], []
    for stride in strides:
        rows, columns = size[0] // stride, size[1] // stride
        y, x = np.meshgrid(np.arange(rows) + 0.5, np.arange(columns) + 0.5, indexing="ij")
        centres.append(np.stack((x, y), axis=2).reshape(-1, 2))
        each.append(np.full(rows * columns, stride))
    return np.concatenate(centres).astype(np.float32), np.concatenate(each).astype(np.float32)
