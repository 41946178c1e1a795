"""How far outputs are from the reference's: the errors that the precision gate measures, and their limits.

Owns: the measures of each task and LIMITS (docs/precision.md has the measured errors and the reasoning). Must not know
executables, engines or devices: it compares arrays. Every measure is an error: 0 is perfect.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from models import Model, NormalisedModel, Options, PixelModel, Placement
from models.exports.images import ExportedDetector

Array = npt.NDArray[Any]

# The largest error of each measure, by task and precision. The errors of correct engines were measured: they are half
# of these limits or less. Wrong outputs (two classes exchanged, all numbers 5 % too large) exceed at least one of them.
LIMITS: dict[str, dict[str, dict[str, float]]] = {
    "classify": {
        "fp32": {"top1": 0.0, "cosine": 1e-5, "logit": 0.01, "scale": 0.002},
        "fp16": {"top1": 0.0, "cosine": 1e-3, "logit": 0.05, "scale": 0.005},
        "bf16": {"top1": 0.0, "cosine": 8e-3, "logit": 0.5, "scale": 0.02},
        "int8": {"top1": 0.0, "cosine": 0.03, "logit": 0.75, "scale": 0.04},
    },
    "detect": {
        "fp32": {"class": 0.0, "score": 0.002, "box": 0.05, "scale": 0.002, "missed": 0.0},
        "fp16": {"class": 0.0, "score": 0.01, "box": 0.2, "scale": 0.005, "missed": 0.0},
        "bf16": {"class": 0.02, "score": 0.1, "box": 0.6, "scale": 0.02, "missed": 0.05},
        "int8": {"class": 0.05, "score": 0.3, "box": 2.0, "scale": 0.04, "missed": 0.1},
    },
    "infer": {
        "fp32": {"cosine": 1e-5, "error": 0.01, "scale": 0.002, "different": 0.001},
        "fp16": {"cosine": 1e-3, "error": 0.05, "scale": 0.005, "different": 0.01},
        "bf16": {"cosine": 8e-3, "error": 0.5, "scale": 0.02, "different": 0.05},
    },
}
_EXTRA_LIMITS = {"fp32": 0.01, "fp16": 0.05, "bf16": 0.5, "int8": 1.0}
for _task in ("segment", "pose", "obb"):
    LIMITS[_task] = {name: {**limits, "extra": _EXTRA_LIMITS[name]} for name, limits in LIMITS["detect"].items()}
_ANCHORS = 100  # Per image, those with the highest scores: the others are never part of an answer.
_LEAST_SPREAD = 0.01  # As a fraction of the output's root mean square.
_SAME_PLACE = 0.7  # Intersection over union of a detection and its counterpart.


def measures(model: Model, expected: Sequence[Array], outputs: Sequence[Array]) -> dict[str, float]:
    """Errors by name of outputs, each [n, ...], against the reference's outputs for the same items.

    Infinite where shapes differ.
    """
    if [output.shape for output in outputs] != [output.shape for output in expected]:
        return dict.fromkeys(LIMITS[model.task]["fp32"], float("inf"))
    if isinstance(model, PixelModel | NormalisedModel):
        model = model.image_model
        if model.task == "infer":
            return _tensors(expected, outputs)
        if isinstance(model, ExportedDetector):
            return _instances(model, expected, outputs)
        return (_classification if model.task == "classify" else _detection)(model, expected, outputs)
    return _tensors(expected, outputs)


def _classification(_: PixelModel, expected: Sequence[Array], outputs: Sequence[Array]) -> dict[str, float]:
    """Errors of logits [n, classes].

    `top1`: fraction of images with a different class, among those where the reference is sure; `cosine`: 1 - cosine of
    the logits without their mean, which softmax ignores; `logit`: the largest error, in standard deviations of the
    image's logits; `scale`: how far the best common factor between both is from 1.
    """
    wanted, given = (each[0].astype(np.float64) for each in (expected, outputs))
    wanted, given = (logits - logits.mean(1, keepdims=True) for logits in (wanted, given))
    spread = wanted.std(1)
    best, second = np.sort(wanted, axis=1)[:, [-1, -2]].T if wanted.shape[1] > 1 else (wanted[:, 0], wanted[:, 0])
    sure = best - second > 0.5 * spread
    wrong = wanted.argmax(1) != given.argmax(1)
    norms = np.linalg.norm(wanted, axis=1) * np.linalg.norm(given, axis=1)
    return {
        "top1": float((wrong & sure).sum() / max(1, sure.sum())),
        "cosine": float((1 - _divided((wanted * given).sum(1), norms)).max()),
        "logit": float(_divided(np.abs(wanted - given).max(1), spread).max()),
        "scale": _scale(wanted, given),
    }


def _detection(
    model: PixelModel,
    expected: Sequence[Array],
    outputs: Sequence[Array],
    whole: Sequence[Array] | None = None,
    other_whole: Sequence[Array] | None = None,
) -> dict[str, float]:
    """Errors of distances [n, anchors, 4], scores and classes [n, anchors], on the anchors with the highest scores.

    `class`: score-weighted fraction of anchors with a different class; `score`: the largest error of a score; `box`:
    the largest error of a side of a box, in strides, weighted by the score up to the default threshold; `scale`: how
    far the best common factor of all distances is from 1; `missed`: fraction of detections that only one side has.
    """
    rows = np.arange(len(expected[0]))[:, None]
    top = np.argsort(-expected[1], axis=1)[:, :_ANCHORS]
    (distances, scores, classes), (given_distances, given_scores, given_classes) = (
        tuple(output[rows, top].astype(np.float64) for output in each) for each in (expected, outputs)
    )
    answered = scores > Options().score_threshold
    # The box of a low score means little, so its error counts in proportion to the score.
    errors = np.abs(distances - given_distances).max(2) * np.minimum(1, scores / Options().score_threshold)
    return {
        "class": float(_divided((scores * (classes != given_classes)).sum(), scores.sum())),
        "score": float(np.abs(scores - given_scores).max()),
        "box": float(errors.max()),
        "scale": _scale(*((each[answered] if answered.any() else each) for each in (distances, given_distances))),
        "missed": _missed(model, whole or expected, other_whole or outputs),
    }


def _instances(model: ExportedDetector, expected: Sequence[Array], outputs: Sequence[Array]) -> dict[str, float]:
    """Errors of an exported detector: as `_detection`, with boxes [n, anchors, 4] in pixels instead of distances.

    Of networks that suppress themselves rows are compared after sorting, since rows of equal scores may change places.
    `extra`: the largest error of what comes beside boxes (mask coefficients, prototypes, key points, angles), in
    standard deviations of each.
    """
    expected, outputs = (_by_score(model, each) for each in (expected, outputs))
    strides = model.strides()[None, :, None]
    wanted, given = ([each[0] / strides, *each[1:3]] for each in (expected, outputs))
    found = _detection(model, wanted, given, [*expected], [*outputs])
    if len(expected) == 3:
        return found
    errors = [0.0]
    # Only anchors that the reference believes in: extras of all others are noise.
    sure = (expected[1] > Options().score_threshold) & (expected[2] == outputs[2])
    for number, (one, other) in enumerate(zip(expected[3:], outputs[3:], strict=True)):
        of_anchors = number == 0 and bool(model.export.how.extras)
        want, have = (each[sure] if of_anchors else each for each in (one, other))
        if want.size:
            want = want.astype(np.float64)
            spread = max(float(want.std()), _LEAST_SPREAD * float(np.sqrt((want**2).mean())))
            errors.append(float(_divided(np.abs(want - have).max(), spread)))
    return {**found, "extra": max(errors)}


def _by_score(model: ExportedDetector, outputs: Sequence[Array]) -> Sequence[Array]:
    """Outputs with the rows of self-suppressing networks in one order: by class, then by place."""
    if model.export.how.strides or not model.export.how.suppressed:
        return outputs
    boxes, scores, classes = outputs[:3]
    believed = scores > Options().score_threshold
    keys = np.where(believed, classes * 1e6 + boxes[..., :2].round().sum(axis=2), 1e12)
    order = np.argsort(keys, axis=1, kind="stable")
    rows = np.arange(len(boxes))[:, None]
    cut = np.take_along_axis(believed, order, axis=1)
    sorted_outputs = [np.where(_as_wide(cut, each), each[rows, order], 0) for each in outputs[:3]]
    extras = 1 if model.export.how.extras else 0
    sorted_outputs += [np.where(_as_wide(cut, each), each[rows, order], 0) for each in outputs[3 : 3 + extras]]
    return [*sorted_outputs, *outputs[3 + extras :]]


def _as_wide(mask: Array, like: Array) -> Array:
    return mask.reshape(*mask.shape, *[1] * (like.ndim - mask.ndim))


def _tensors(expected: Sequence[Array], outputs: Sequence[Array]) -> dict[str, float]:
    """Errors of any tensors [n, ...]; of each measure that of the worst output.

    `cosine`: 1 - cosine of an item's numbers; `error`: the largest error, in standard deviations of the output over all
    probes; `scale`: how far the best common factor is from 1; `different`: fraction of integers that differ, and 1 if
    NaN or infinity are at different places.
    """
    worst = {"cosine": 0.0, "error": 0.0, "scale": 0.0, "different": 0.0}
    for wanted, given in zip(expected, outputs, strict=True):
        floats = wanted.dtype.kind == "f"
        errors = _of_floats(wanted, given) if floats else {"different": float((wanted != given).mean())}
        worst = {name: max(value, errors.get(name, 0.0)) for name, value in worst.items()}
    return worst


def _of_floats(expected: Array, output: Array) -> dict[str, float]:
    wanted, given = (each.astype(np.float64).reshape(len(each), -1) for each in (expected, output))
    finite = np.isfinite(wanted) & np.isfinite(given)
    strange = ~finite & (wanted != given) & ~(np.isnan(wanted) & np.isnan(given))
    wanted[~finite] = given[~finite] = 0
    # The spread of an almost constant output is rounding noise: its size is the yardstick then.
    spread = max(float(wanted.std()), _LEAST_SPREAD * float(np.sqrt((wanted**2).mean())))
    norms = np.linalg.norm(wanted, axis=1) * np.linalg.norm(given, axis=1)
    return {
        "cosine": float((1 - _divided((wanted * given).sum(1), norms))[norms > 0].max(initial=0.0)),
        "error": float(_divided(np.abs(wanted - given).max(), spread)),
        "scale": _scale(wanted, given) if wanted.any() else 0.0,
        "different": float(strange.any()),
    }


def _missed(model: PixelModel, expected: Sequence[Array], outputs: Sequence[Array]) -> float:
    """Fraction of detections (score over 0.4) without a counterpart (score over 0.15, same class) on the other side.

    The two thresholds differ so that rounding does not decide.
    """
    missed = sure = 0
    for one, other in ((expected, outputs), (outputs, expected)):
        for row in range(len(one[0])):
            there = _detections(model, other, row, Options(score_threshold=0.15))
            for label, box in _detections(model, one, row, Options(score_threshold=0.4)):
                sure += 1
                missed += not any(label == name and _overlap(box, place) >= _SAME_PLACE for name, place in there)
    return missed / max(1, sure)


def _detections(model: PixelModel, outputs: Sequence[Array], row: int, options: Options) -> list[tuple[int, Array]]:
    height, width = model.input_shape[:2]
    answer = model.postprocess(model.reduce(outputs, row, options), Placement(width, height), options)
    return [(found["class_id"], np.array([*found["box"].values()])) for found in answer["detections"]]


def _overlap(one: Array, other: Array) -> float:
    sides = np.minimum(one[2:], other[2:]) - np.maximum(one[:2], other[:2])
    shared = float(sides.clip(0).prod())
    whole = float((one[2:] - one[:2]).prod() + (other[2:] - other[:2]).prod()) - shared
    return shared / whole if whole > 0 else 0.0


def _scale(wanted: Array, given: Array) -> float:
    # The least-squares factor: random errors average out of it, a systematic one does not.
    return float(abs(_divided((wanted * given).sum(), (wanted * wanted).sum()) - 1))


def _divided(numerator: Any, denominator: Any) -> Any:
    """The quotient, with 0 / 0 = 0: both sides empty or all zero is no error."""
    numerator, denominator = np.asarray(numerator, np.float64), np.asarray(denominator, np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where((numerator == 0) & (denominator == 0), 0.0, numerator / denominator)
