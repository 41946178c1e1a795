"""Detection: instances with a box, a score and a class; the other tasks of instances extend it.

Owns: turning candidates into instances, the answer's form, and the precision gate's measures of it. Must not know how a
network is stored or how its outputs became candidates (models.exports.layouts).
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
from models.tasks.accuracy import Boxes, MeanAveragePrecision, overlaps
from models.tasks.instances import MAX_CANDIDATES, suppress

Found = dict[str, Array]
"""Instances of an image: `boxes` float64 [k, 4] in its pixels, `scores`, `classes`, and the task's additions."""

LIMITS: Limits = {
    "fp32": {"class": 0.002, "score": 0.002, "box": 0.05, "scale": 0.002, "missed": 0.0},
    "fp16": {"class": 0.005, "score": 0.01, "box": 0.2, "scale": 0.005, "missed": 0.0},
    "bf16": {"class": 0.02, "score": 0.1, "box": 0.6, "scale": 0.02, "missed": 0.05},
    "int8": {"class": 0.05, "score": 0.3, "box": 2.0, "scale": 0.04, "missed": 0.1},
}
_EXTRA_LIMITS = {"fp32": 0.01, "fp16": 0.05, "bf16": 0.5, "int8": 1.0}
LIMITS_WITH_EXTRAS: Limits = {name: {**limits, "extra": _EXTRA_LIMITS[name]} for name, limits in LIMITS.items()}
"""Limits of tasks that add to boxes."""

_ANCHORS = 100  # Per image, those with the highest scores: the others are never part of an answer.
_SAME_PLACE = 0.7  # Intersection over union of a detection and its counterpart.
_SUPPRESSED = 0.45  # IoU above which a network may have dropped one of two boxes; torchvision's threshold is 0.5.
_CANDIDATES = 2_000  # Per image, in the search for counterparts.
_SCORE, _CLASS = 0.1, 100.0  # Costs in comparing rows: score error that equals a stride; another class in strides.
_USUAL_STRIDE = 16  # If the anchors are not known.


class Detect(TaskAdapter):
    """Detection. `extras`: the names of the outputs beside boxes, scores and classes, those of each candidate first."""

    finds = "objects"
    takes: ClassVar[Takes] = "boxes"
    tiled = True
    limits = LIMITS
    accuracy = MeanAveragePrecision()
    extras: ClassVar[tuple[str, ...]] = ()

    @property
    def outputs(self) -> tuple[str, ...]:
        """Boxes, scores, classes, and the task's extras; for distances also the numbers of their anchors."""
        if self.file.distances:
            return "distances", "scores", "classes", "anchors"
        return "boxes", "scores", "classes", *self.extras

    def reduce(self, outputs: Sequence[Array], options: Options) -> tuple[Array, ...]:
        """Select candidates by descending score: boxes [k, 4], scores [k], classes [k], and the task's extras."""
        boxes, scores, classes, *others = outputs
        # Rows that the network has filled up with zeros are none, whatever the threshold.
        chosen = np.flatnonzero(scores > max(options.score_threshold, 0.0))
        chosen = chosen[np.argsort(-scores[chosen], kind="stable")[:MAX_CANDIDATES]]
        boxes = self._boxes(boxes[chosen], others[0][chosen]) if self.file.distances else boxes[chosen]
        return boxes, scores[chosen], classes[chosen], *self.kept_extras(others, chosen)

    def _boxes(self, distances: Array, anchors: Array) -> Array:
        """Compute the boxes of candidates in pixels of the input.

        Distances are in strides, and places are computed here. A low-precision engine then errs relative to the size of
        a box, not to its place in the image (bfloat16 counts in steps of 4 beyond 512).
        """
        centres, strides = (each[anchors] for each in _anchors(self.file.size, self.file.strides))
        corners: Array = np.concatenate((centres - distances[:, :2], centres + distances[:, 2:]), axis=1)
        return corners * strides[:, None]

    def kept_extras(self, others: Sequence[Array], chosen: Array) -> list[Array]:
        """Select, for the chosen candidates, the further outputs of an image that the server needs."""
        return [other[chosen] for other in others[: len(self.extras)]]

    def keep(self, outputs: Sequence[Array], options: Options) -> Array:
        """Return the indices of the remaining candidates, by descending score; `outputs` are by descending score."""
        boxes, scores, classes = outputs[:3]
        return suppress(boxes, scores, classes, options.iou_threshold, options.max_detections)

    def locate(self, outputs: Sequence[Array], kept: Array, fit: Fit) -> Found:
        """Return the boxes of the kept instances, and the task's additions."""
        return {"boxes": fit.boxes(outputs[0][kept].astype(np.float64))}

    def describe(self, found: Found, fit: Fit, options: Options) -> Sequence[Mapping[str, Any] | None]:
        """Return each instance's entry beside label, score and box; None drops the instance."""
        return [{} for _ in found["scores"]]

    def found(self, outputs: Sequence[Array], placement: Placement, options: Options) -> tuple[Found, Array, Fit]:
        """Return the instances, their indices among the candidates, and the image's position."""
        if self.file.suppressed:
            kept = np.arange(min(len(outputs[1]), max(0, options.max_detections)))
        else:
            kept = self.keep(outputs, options)
        fit = self.file.resize.fit(placement)
        located = self.locate(outputs, kept, fit)
        if options.min_area:
            areas = (located["boxes"][:, 2:] - located["boxes"][:, :2]).prod(axis=1)
            kept = kept[areas >= options.min_area]
            located = self.locate(outputs, kept, fit)
        return {"scores": outputs[1][kept], "classes": outputs[2][kept].astype(np.int64), **located}, kept, fit

    def postprocess(self, outputs: Sequence[Array], placement: Placement, options: Options) -> dict[str, Any]:
        """Return instances by descending score, all coordinates in pixels of the image as displayed."""
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
        """Tensors of instances by descending score; in a batch, images with fewer are filled up with zeros."""
        return (
            OutputSpec("boxes", "FP32", (-1, -1, 4)),
            OutputSpec("scores", "FP32", (-1, -1)),
            OutputSpec("classes", "INT32", (-1, -1)),
            OutputSpec("num_detections", "INT32", (-1,)),
        )

    def tensors(self, outputs: Sequence[Array], placement: Placement, options: Options) -> dict[str, Array]:
        """Return boxes float32 [k, 4], x1, y1, x2, y2 in pixels of the image, scores [k], classes [k], their number."""
        found, kept, _ = self.found(outputs, placement, options)
        return {
            "boxes": found["boxes"].astype(np.float32),
            "scores": found["scores"].astype(np.float32),
            "classes": found["classes"].astype(np.int32),
            "num_detections": np.array(len(kept), np.int32),
            **self.extra_tensors(found, outputs[0][kept]),
        }

    def extra_tensors(self, found: Found, boxes: Array) -> dict[str, Array]:
        """Return the tensors that the task adds to `answers`. `boxes`: of the instances, in pixels of the input."""
        return {}

    def measures(self, expected: Sequence[Array], outputs: Sequence[Array]) -> dict[str, float]:
        """Compute errors of boxes [n, anchors, 4], scores and classes [n, anchors], on the anchors with the highest
        scores.

        `class`: score-weighted fraction of anchors with a different class; `score`: the largest error of a score;
        `box`: the largest error of a side of a box, in strides, weighted by the score up to the default threshold;
        `scale`: how far the best common factor of all boxes is from 1; `missed`: fraction of detections that only one
        side has; `extra`: the largest error of the task's extras, in standard deviations of each.

        Rows of networks with their own suppression are compared as sets, each with the row most like it. `class` is
        then the fraction without one, except rows that ties may have decided.
        """
        if self.file.distances:
            expected, outputs = self._by_anchor(expected), self._by_anchor(outputs)
        images = np.arange(len(expected[0]))[:, None]
        top = np.argsort(-expected[1], axis=1, kind="stable")[:, :_ANCHORS]
        other, found = top, np.full(top.shape, True)
        if self.file.suppressed:
            other, found = self._most_alike(expected, outputs, top)
        strides = np.broadcast_to(self._strides(), (*expected[1].shape[1:], 1))[top]
        boxes, scores, classes = (each[images, top].astype(np.float64) for each in expected[:3])
        given_boxes, given_scores, given_classes = (each[images, other].astype(np.float64) for each in outputs[:3])
        wrong = classes != given_classes
        if self.file.suppressed:
            found &= ~wrong & _is_near(boxes, given_boxes)
        errors = np.abs(scores - given_scores)[found]
        tolerance = float(errors.max(initial=0.0))
        if self.file.suppressed:
            least = _least(expected[1], outputs[1])
            rows = zip(map(Boxes, boxes, classes, scores), found, least, strict=True)
            wrong = ~found & ~np.stack([_tied(*each, tolerance) for each in rows])
        threshold = Options().score_threshold
        answered = found & (scores > threshold)
        chosen = answered if answered.any() else found
        boxes, given_boxes = boxes / strides, given_boxes / strides
        # The box of a low score means little, so its error counts in proportion to the score.
        far = np.abs(boxes - given_boxes).max(2) * np.minimum(1, scores / threshold)
        measured = {
            "class": float(divided((scores * wrong).sum(), scores.sum())),
            "score": tolerance,
            "box": float(far[found].max(initial=0.0)),
            "scale": scale_error(boxes[chosen], given_boxes[chosen]) if boxes[chosen].any() else 0.0,
            "missed": self._missed(expected, outputs, tolerance),
        }
        if self.extras:
            # Only anchors that the reference believes in: extras of all others are noise.
            sure = answered & (classes == given_classes)
            of = np.broadcast_to(images, top.shape)[sure]
            wanted = self.compared_extras(expected[3:], (of, top[sure]))
            pairs = zip(wanted, self.compared_extras(outputs[3:], (of, other[sure])), strict=True)
            measured["extra"] = max([in_deviations(*pair) for pair in pairs if pair[0].size], default=0.0)
        return measured

    def compared_extras(self, extras: Sequence[Array], places: tuple[Array, Array]) -> list[Array]:
        """Return the extras of candidates that `measures` compares: `places` are their images and rows."""
        return [extras[0][places], *extras[1:]]

    def _strides(self) -> Array:
        """Return the pixels of the input for an error of 1 in a box, float32 [anchors, 1] or [1]."""
        height, width = self.file.size
        if self.file.distances:
            return np.ones(1, np.float32)
        each = [np.full((height // s) * (width // s), s, np.float32) for s in self.file.strides]
        return np.concatenate(each)[:, None] if each else np.full(1, _USUAL_STRIDE, np.float32)

    def _most_alike(self, expected: Sequence[Array], outputs: Sequence[Array], top: Array) -> tuple[Array, Array]:
        """Find, for each of the rows `top` of an image, the row of the same image most like it, and whether that row is
        not more like another of them: int and bool [n, top].
        """
        images = np.arange(len(top))[:, None]
        boxes, scores, classes = (each[images, top][:, :, None] for each in expected[:3])
        far = np.abs(boxes - outputs[0][:, None]).max(3) / _USUAL_STRIDE
        cost = far + np.abs(scores - outputs[1][:, None]) / _SCORE + _CLASS * (classes != outputs[2][:, None])
        alike, least = cost.argmin(axis=2), cost.min(axis=2)
        nearest = np.full(outputs[1].shape, np.inf)
        np.minimum.at(nearest, (images, alike), least)
        return alike, least <= nearest[images, alike]

    def _by_anchor(self, outputs: Sequence[Array]) -> Sequence[Array]:
        """Put each anchor into the row of its number; rows of missing anchors are zeros."""
        count = len(_anchors(self.file.size, self.file.strides)[1])
        images = np.arange(len(outputs[0]))[:, None]
        found = [np.zeros((len(each), count, *each.shape[2:]), each.dtype) for each in outputs]
        for each, values in zip(found, outputs, strict=True):
            each[images, outputs[3]] = values
        found[3][:] = np.arange(count)
        return found

    def _missed(self, expected: Sequence[Array], outputs: Sequence[Array], tolerance: float) -> float:
        """Compute the fraction of detections (score over 0.4) without a candidate on the other side (score over 0.15,
        same class and place). The two thresholds differ so that rounding does not decide. Candidates are those before
        suppression and the cut at the most detections, which ties may decide.
        """
        height, width = self.file.size
        fit = self.file.resize.fit(Placement(width, height))

        def boxes(given: Sequence[Array], row: int, threshold: float, *, suppressed: bool) -> Boxes:
            options = Options(score_threshold=threshold)
            reduced = self.reduce([each[row] for each in given], options)
            kept = self.keep(reduced, options) if suppressed else np.arange(min(len(reduced[1]), _CANDIDATES))
            return Boxes(self.locate(reduced, kept, fit)["boxes"], reduced[2][kept], reduced[1][kept])

        missed = sure = 0
        least = _least(expected[1], outputs[1])
        for one, other in ((expected, outputs), (outputs, expected)):
            for row in range(len(one[0])):
                mine = boxes(one, row, 0.4, suppressed=not self.file.suppressed)
                theirs = boxes(other, row, 0.15, suppressed=False)
                shared = overlaps(mine.boxes, theirs.boxes) * (mine.classes[:, None] == theirs.classes[None])
                lacking = shared.max(axis=1, initial=0) < _SAME_PLACE
                if self.file.suppressed:
                    lacking &= ~_tied(mine, ~lacking, least[row], tolerance)
                sure += len(mine.classes)
                missed += int(lacking.sum())
        return missed / max(1, sure)


def _is_near(boxes: Array, others: Array) -> Array:
    """Return True for each box [..., 4] near the other: within half a stride, or a tenth of its longer side."""
    sides = (boxes[..., 2:] - boxes[..., :2]).max(-1)
    near: Array = np.abs(boxes - others).max(-1) <= np.maximum(_USUAL_STRIDE / 2, 0.1 * sides)
    return near


def _least(scores: Array, others: Array) -> Array:
    """Return the score at which each image's rows end, float64 [n]; of images with room for more, the least of all."""
    both = np.stack((scores, others)).astype(np.float64)
    last = both.min(axis=(0, 2))
    threshold = both[both > 0].min(initial=1.0)
    ends: Array = np.where(last > 0, both.min(axis=2).max(axis=0), threshold)
    return ends


def _tied(rows: Boxes, found: Array, least: float, tolerance: float) -> Array:
    """Return True for the rows of an image that another correct engine may lack: their scores are among the last, or
    they overlap one of their class that is `found` and not worse, and suppression decides by their overlap.
    """
    upon = overlaps(rows.boxes, rows.boxes) * (rows.classes[:, None] == rows.classes[None])
    better = found[None] & (rows.scores[None] >= rows.scores[:, None] - tolerance)
    tied: Array = (rows.scores <= least + tolerance) | ((upon > _SUPPRESSED) & better).any(axis=1)
    return tied


@lru_cache(maxsize=8)
def _anchors(size: tuple[int, int], strides: tuple[int, ...]) -> tuple[Array, Array]:
    """Return centres float32 [anchors, 2] as (x, y) in strides, and strides float32 [anchors], row by row."""
    centres, each = [], []
    for stride in strides:
        rows, columns = size[0] // stride, size[1] // stride
        y, x = np.meshgrid(np.arange(rows) + 0.5, np.arange(columns) + 0.5, indexing="ij")
        centres.append(np.stack((x, y), axis=2).reshape(-1, 2))
        each.append(np.full(rows * columns, stride))
    return np.concatenate(centres).astype(np.float32), np.concatenate(each).astype(np.float32)
