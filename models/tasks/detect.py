"""Detection: instances with a box, a score and a class; and with masks, key points or turned boxes.

Owns: turning candidates into instances, the answers' forms, the bounds on the cost of an image's masks, and the
precision gate's measures. Must not know how a network is stored or how its outputs became candidates
(models.exports.layouts).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np

from models.contract.measures import Limits, divided, in_deviations, scale_error
from models.contract.model import Array, Options, OutputSpec, Placement
from models.contract.resize import Fit
from models.contract.task_adapter import AdaptedFile, Takes, TaskAdapter
from models.tasks.accuracy import Boxes, MeanAveragePrecision, overlaps
from models.tasks.instances import (
    MAX_CANDIDATES,
    MaskGrid,
    combined,
    corners_of,
    mask_reduction,
    polygons_of,
    regular,
    suppress,
    suppress_turned,
    written,
)

Found = dict[str, Array]
"""Instances of an image: `boxes` float64 [k, 4] in its pixels, `scores`, `classes`, and the task's additions."""

_LIMITS: Limits = {
    "fp32": {"class": 0.002, "score": 0.002, "box": 0.05, "scale": 0.002, "missed": 0.0},
    "fp16": {"class": 0.005, "score": 0.01, "box": 0.2, "scale": 0.005, "missed": 0.0},
    "bf16": {"class": 0.02, "score": 0.1, "box": 0.6, "scale": 0.02, "missed": 0.05},
    "int8": {"class": 0.05, "score": 0.3, "box": 2.0, "scale": 0.04, "missed": 0.1},
}
_EXTRA_LIMITS = {"fp32": 0.01, "fp16": 0.05, "bf16": 0.5, "int8": 1.0}
_LIMITS_WITH_EXTRAS: Limits = {name: {**limits, "extra": _EXTRA_LIMITS[name]} for name, limits in _LIMITS.items()}
"""Limits of tasks that add to boxes."""

_ANCHORS = 100  # Per image, those with the highest scores: the others are never part of an answer.
_SAME_PLACE = 0.7  # Intersection over union of a detection and its counterpart.
_SUPPRESSED = 0.45  # IoU above which a network may have dropped one of two boxes; torchvision's threshold is 0.5.
_CANDIDATES = 2_000  # Per image, in the search for counterparts.
_SCORE, _CLASS = 0.1, 100.0  # Costs in comparing rows: score error that equals a stride; another class in strides.
_USUAL_STRIDE = 16  # If the anchors are not known.
_POINTS = 50_000  # For all polygons of an image; each may have at least _LEAST_POINTS.
_LEAST_POINTS = 200
_MASK_PIXELS = 64_000_000


class Detect(TaskAdapter):
    """Detection. `extras`: the names of the outputs beside boxes, scores and classes, those of each candidate first."""

    finds = "objects"
    takes: ClassVar[Takes] = "boxes"
    tiled = True
    limits = _LIMITS
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
        # Places are computed here: a low-precision engine then errs relative to the size of a box, not to its place.
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
        return {spec.name: found[spec.name].astype(np.float32) for spec in self.answers[4:]}

    def measures(self, expected: Sequence[Array], outputs: Sequence[Array]) -> dict[str, float]:
        """Compute errors of boxes, scores and classes, on the anchors with the highest scores (docs/precision.md).

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
            # Near is within half a stride, or a tenth of the longer side.
            sides = (boxes[..., 2:] - boxes[..., :2]).max(-1)
            found &= ~wrong & (np.abs(boxes - given_boxes).max(-1) <= np.maximum(_USUAL_STRIDE / 2, 0.1 * sides))
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
        if self.file.distances:
            return np.ones(1, np.float32)
        strides = self.file.strides
        return _anchors(self.file.size, strides)[1][:, None] if strides else np.full(1, _USUAL_STRIDE, np.float32)

    def _most_alike(self, expected: Sequence[Array], outputs: Sequence[Array], top: Array) -> tuple[Array, Array]:
        """Find the row most like each of the rows `top`, and whether it is not more like another: [n, top]."""
        images = np.arange(len(top))[:, None]
        boxes, scores, classes = (each[images, top][:, :, None] for each in expected[:3])
        far = np.abs(boxes - outputs[0][:, None]).max(3) / _USUAL_STRIDE
        cost = far + np.abs(scores - outputs[1][:, None]) / _SCORE + _CLASS * (classes != outputs[2][:, None])
        alike, least = cost.argmin(axis=2), cost.min(axis=2)
        nearest = np.full(outputs[1].shape, np.inf)
        np.minimum.at(nearest, (images, alike), least)
        return alike, least <= nearest[images, alike]

    def _by_anchor(self, outputs: Sequence[Array]) -> Sequence[Array]:
        count = len(_anchors(self.file.size, self.file.strides)[1])
        images = np.arange(len(outputs[0]))[:, None]
        found = [np.zeros((len(each), count, *each.shape[2:]), each.dtype) for each in outputs]
        for each, values in zip(found, outputs, strict=True):
            each[images, outputs[3]] = values
        found[3][:] = np.arange(count)
        return found

    def _missed(self, expected: Sequence[Array], outputs: Sequence[Array], tolerance: float) -> float:
        # The two thresholds differ so that rounding does not decide. Candidates are those before suppression and the
        # cut at the most detections, which ties may decide.
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


class Segment(Detect):
    """Masks: adds `coefficients` [k, m] and `prototypes` float32 [m, h, w], which are combined into masks."""

    takes = "masks"
    extras = ("coefficients", "prototypes")
    limits = _LIMITS_WITH_EXTRAS

    def kept_extras(self, others: Sequence[Array], chosen: Array) -> list[Array]:
        """Keep only the prototypes that the candidates use: they are megabytes."""
        coefficients, prototypes = others
        coefficients = coefficients[chosen]
        used = coefficients.any(axis=0)  # If prototypes are the masks, those of other candidates are unused.
        return [coefficients[:, used], np.asarray(prototypes[used], np.float32)]

    def compared_extras(self, extras: Sequence[Array], places: tuple[Array, Array]) -> list[Array]:
        """Return the masks for networks with their own suppression, which may number their prototypes otherwise."""
        if not self.file.suppressed:
            return super().compared_extras(extras, places)
        (images, rows), (coefficients, prototypes) = places, extras
        return [combined(coefficients[each, rows[images == each]], prototypes[each]) for each in np.unique(images)]

    def locate(self, outputs: Sequence[Array], kept: Array, fit: Fit) -> Found:
        return {**super().locate(outputs, kept, fit), "coefficients": outputs[3][kept], "prototypes": outputs[4]}

    def describe(self, found: Found, fit: Fit, options: Options) -> Sequence[Mapping[str, Any] | None]:
        """Return `segments` or `mask`. None for an empty mask: that is no instance, here and in the reference.

        All masks together have at most `_MASK_PIXELS`: the instances after that have none.
        """
        if options.masks == "none":
            return super().describe(found, fit, options)
        if options.masks == "polygon":
            return [None if rings is None else {"segments": rings} for rings in polygons(found, fit)]
        sides = np.maximum(0, np.ceil(found["boxes"][:, 2:]) - np.ceil(found["boxes"][:, :2]))
        within = int((sides.prod(axis=1).cumsum() <= _MASK_PIXELS).sum())
        first = {name: found[name][:within] for name in ("scores", "coefficients", "boxes")}
        parts = _within_boxes({**first, "prototypes": found["prototypes"]}, fit, 1.0)
        size = fit.placement.width, fit.placement.height
        masks = [mask and {"mask": mask} for mask in written(options.masks, parts, *size)]
        return [*masks, *({"mask": None} for _ in found["scores"][within:])]

    @property
    def answers(self) -> tuple[OutputSpec, ...]:
        height, width = (side // 4 for side in self.file.size)
        return *super().answers, OutputSpec("masks", "UINT8", (-1, -1, height, width))

    def extra_tensors(self, found: Found, boxes: Array) -> dict[str, Array]:
        """Return masks uint8 [k, h/4, w/4] in the network's resolution, cut at their boxes."""
        height, width = (side // 4 for side in self.file.size)
        prototypes = found["prototypes"]
        masks = np.zeros((len(found["scores"]), height, width), np.uint8)
        if len(masks) and prototypes.shape[1:] == (height, width):
            for number, (x1, y1, x2, y2) in enumerate(np.ceil(boxes / 4).clip(0, (width, height) * 2).astype(int)):
                one = found["coefficients"][number : number + 1]
                masks[number, y1:y2, x1:x2] = combined(one, prototypes[:, y1:y2, x1:x2])[0] > 0
        return {"masks": masks}

    def moved(self, entry: Mapping[str, Any], x: int, y: int) -> dict[str, Any]:
        moved = super().moved(entry, x, y)
        if "segments" in moved:  # Masks may not have been asked for.
            moved["segments"] = [[[px + x, py + y] for px, py in ring] for ring in entry["segments"]]
        return moved


def grid(prototypes: Array, fit: Fit, factor: float = 1.0) -> MaskGrid:
    """Return the position of prototypes [m, h, w] in an image reduced by `factor`."""
    size = np.array([fit.placement.width, fit.placement.height])
    (left, top), (right, bottom) = fit.pad, fit.pad + fit.scale * size
    width, height = (max(1, round(side * factor)) for side in size.tolist())
    ratio = (prototypes.shape[2] / fit.size[1], prototypes.shape[1] / fit.size[0])
    return MaskGrid.of(ratio, (float(left), float(top), float(right), float(bottom)), (width, height))


def polygons(found: Found, fit: Fit) -> list[list[list[list[float]]] | None]:
    """Return each instance's rings of points in pixels of the image; None for an empty mask."""
    most = max(_LEAST_POINTS, _POINTS // max(1, len(found["scores"])))
    factor = mask_reduction(fit.placement.width, fit.placement.height)
    outlines: list[list[list[list[float]]] | None] = []
    for mask, x, y in _within_boxes(found, fit, factor):
        rings = polygons_of(mask, x, y, most) if mask.size else None
        if rings is None:
            outlines.append(None)
            continue
        whole = factor == 1  # Then the points are pixels.
        outlines.append([(ring if whole else (ring / factor).round(1)).tolist() for ring in rings])
    return outlines


def _within_boxes(found: Mapping[str, Array], fit: Fit, factor: float) -> Iterator[tuple[Array, int, int]]:
    """Yield each instance's mask within its box, and its first pixel, in an image reduced by `factor`."""
    if len(found["scores"]):
        masks = grid(found["prototypes"], fit, factor)
        yield from masks.masks(found["coefficients"], found["prototypes"], found["boxes"] * factor)


class Pose(Detect):
    """Poses: adds `keypoints` float64 [k, points, 3]: x and y in pixels of the image, and a score, 1 by default."""

    takes = "keypoints"
    extras = ("keypoints",)
    limits = _LIMITS_WITH_EXTRAS

    def __init__(self, file: AdaptedFile) -> None:
        """Read the option `keypoints`: their number, and the values of each. Raises ValueError if it is missing."""
        super().__init__(file)
        number, values = file.option("keypoints") or (0, 0)
        if not number:
            raise ValueError('a network of poses needs "keypoints": [17, 3] in its sidecar')
        self.keypoints: tuple[int, int] = number, values

    def locate(self, outputs: Sequence[Array], kept: Array, fit: Fit) -> Found:
        points = outputs[3][kept].astype(np.float64).reshape(len(kept), *self.keypoints)
        visible = points[..., 2:3] if points.shape[2] > 2 else np.ones((*points.shape[:2], 1))
        found = super().locate(outputs, kept, fit)
        return {**found, "keypoints": np.concatenate((fit.points(points[..., :2]), visible), axis=2)}

    def describe(self, found: Found, fit: Fit, options: Options) -> Sequence[Mapping[str, Any] | None]:
        return [
            {"keypoints": [{"x": round(x, 2), "y": round(y, 2), "score": round(score, 5)} for x, y, score in points]}
            for points in found["keypoints"].tolist()
        ]

    @property
    def answers(self) -> tuple[OutputSpec, ...]:
        return *super().answers, OutputSpec("keypoints", "FP32", (-1, -1, self.keypoints[0], 3))  # x, y, score

    def moved(self, entry: Mapping[str, Any], x: int, y: int) -> dict[str, Any]:
        points = [{**point, "x": point["x"] + x, "y": point["y"] + y} for point in entry["keypoints"]]
        return {**super().moved(entry, x, y), "keypoints": points}


class TurnedBoxes(Detect):
    """Turned boxes: adds `turned` float64 [k, 5] and `corners` [k, 4, 2]; `boxes` are the upright ones around them."""

    takes = "turned"
    extras = ("angles",)
    limits = _LIMITS_WITH_EXTRAS

    def keep(self, outputs: Sequence[Array], options: Options) -> Array:
        """Suppress by ProbIoU, Ultralytics' overlap of turned boxes."""
        boxes, _, classes, angles = outputs[:4]
        return suppress_turned(boxes, angles[:, 0], classes, options.iou_threshold, options.max_detections)

    def locate(self, outputs: Sequence[Array], kept: Array, fit: Fit) -> Found:
        """Return turned boxes with the longer side as width, in pixels of the image."""
        boxes = (outputs[0][kept].astype(np.float64) - np.concatenate((fit.pad, np.zeros(2)))) / np.tile(fit.scale, 2)
        boxes, angles = regular(boxes, outputs[3][kept, 0].astype(np.float64))
        corners = corners_of(boxes, angles)
        limit = [fit.placement.width, fit.placement.height] * 2
        return {
            "turned": np.concatenate((boxes, angles[:, None]), axis=1),
            "corners": corners,
            "boxes": np.concatenate((corners.min(axis=1), corners.max(axis=1)), axis=1).clip(0, limit),
        }

    def describe(self, found: Found, fit: Fit, options: Options) -> Sequence[Mapping[str, Any] | None]:
        names = ("cx", "cy", "w", "h", "angle")
        turned = np.concatenate((found["turned"][:, :4].round(2), found["turned"][:, 4:].round(5)), axis=1)
        return [
            {"obb": dict(zip(names, box, strict=True)), "corners": corners}
            for box, corners in zip(turned.tolist(), found["corners"].round(2).tolist(), strict=True)
        ]

    @property
    def answers(self) -> tuple[OutputSpec, ...]:
        # Centre x and y, width, height and angle; corners around the box.
        turned = OutputSpec("turned", "FP32", (-1, -1, 5)), OutputSpec("corners", "FP32", (-1, -1, 4, 2))
        return *super().answers, *turned

    def moved(self, entry: Mapping[str, Any], x: int, y: int) -> dict[str, Any]:
        obb = {**entry["obb"], "cx": entry["obb"]["cx"] + x, "cy": entry["obb"]["cy"] + y}
        corners = [[px + x, py + y] for px, py in entry["corners"]]
        return {**super().moved(entry, x, y), "obb": obb, "corners": corners}
