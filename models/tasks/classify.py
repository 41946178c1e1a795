"""Classification: the classes of the highest scores.

Logits become scores by softmax, or by a sigmoid each if several classes may be present. Must not know networks or how
images are read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from models.contract.measures import Accuracy, Limits, divided, in_deviations, scale_error
from models.contract.model import Array, Options, OutputSpec, Placement, softmax
from models.contract.task_adapter import AdaptedFile, TaskAdapter
from models.tasks.accuracy import Top1

_LIMITS: Limits = {
    "fp32": {"top1": 0.0, "score": 0.01, "cosine": 1e-5, "logit": 0.01, "scale": 0.002},
    "fp16": {"top1": 0.0, "score": 0.05, "cosine": 1e-3, "logit": 0.05, "scale": 0.005},
    "bf16": {"top1": 0.0, "score": 0.1, "cosine": 8e-3, "logit": 0.5, "scale": 0.02},
    "int8": {"top1": 0.0, "score": 0.3, "cosine": 0.03, "logit": 0.75, "scale": 0.04},
}
_LIMITS_EACH: Limits = {
    "fp32": {"class": 0.0, "score": 0.002, "logit": 0.01, "scale": 0.002},
    "fp16": {"class": 0.0, "score": 0.02, "logit": 0.05, "scale": 0.005},
    "bf16": {"class": 0.0, "score": 0.1, "logit": 0.5, "scale": 0.02},
    "int8": {"class": 0.0, "score": 0.1, "logit": 0.75, "scale": 0.04},
}
"""Limits for scores with a sigmoid each."""
_SURE = 0.1  # Least distance of a sigmoid's score from a half.
_LOWEST, _HIGHEST = -9.0, 6.0  # Limits of a logit: beyond them a score is 0 or 1 within two thousandths.
_FEW = 16
"""Largest number of classes that are found sooner one by one than by sorting."""


class Classify(TaskAdapter):
    """Classification: the `top_k` classes by descending score; equal scores by ascending number.

    Options: `scores`, `softmax`, or `sigmoid` if each class has a score of its own. The only class of a network has a
    sigmoid in any case: softmax would always make 1 of it.
    """

    finds = "classes"
    takes = "classes"
    limits = _LIMITS
    accuracy: Accuracy | None = Top1()
    known_options = ("scores",)
    outputs = ("logits",)

    def __init__(self, file: AdaptedFile) -> None:
        super().__init__(file)
        self.each = file.option("scores") == "sigmoid" or len(file.labels) == 1
        self.scored_by: Literal["softmax", "sigmoid"] = "sigmoid" if self.each else "softmax"
        self.scores = sigmoid if self.each else softmax
        if self.each:
            self.limits = _LIMITS_EACH
            self.accuracy = None  # The first class is no measure of independent scores.

    def reduce(self, outputs: Sequence[Array], options: Options) -> tuple[Array, ...]:
        return (outputs[0].astype(np.float32, copy=True),)

    def reduce_all(self, outputs: Sequence[Array], options: Sequence[Options]) -> list[tuple[Array, ...]]:
        """Find the best classes of a whole batch, outside the server's event loop. Add logits if tensors are asked for;
        return logits alone if too many classes are.
        """
        logits = outputs[0][: len(options)].astype(np.float32, copy=True)
        best = best_of_all(logits, [each.top_k for each in options], self.scores)
        if best is None:
            return [(row,) for row in logits]
        return [
            (row, found) if each.tensors else (found,) for row, found, each in zip(logits, best, options, strict=True)
        ]

    def postprocess(self, outputs: Sequence[Array], placement: Placement, options: Options) -> dict[str, Any]:
        best, scores = best_in(outputs, options.top_k, self.scores)
        labels = self.file.labels
        return {
            "classes": [
                {"label": labels[class_id], "class_id": class_id, "score": score}
                for class_id, score in zip(best, scores, strict=True)
            ]
        }

    def postprocess_all(
        self, outputs: Sequence[Sequence[Array]], placements: Sequence[Placement], options: Options
    ) -> list[Mapping[str, Any]]:
        """Postprocess several images in a third of the time: NumPy's cost is per call more than per number."""
        if outputs:
            logits = np.stack([each[0] for each in outputs])
            best = best_of_all(logits, [options.top_k] * len(outputs), self.scores)
            outputs = outputs if best is None else [(each,) for each in best]
        return super().postprocess_all(outputs, placements, options)

    @property
    def answers(self) -> tuple[OutputSpec, ...]:
        return tuple(OutputSpec(name, "FP32", (-1, len(self.file.labels))) for name in ("logits", "probabilities"))

    def tensors(self, outputs: Sequence[Array], placement: Placement, options: Options) -> dict[str, Array]:
        assert outputs[0].ndim == 1, "the logits were not asked for"
        return {"logits": outputs[0], "probabilities": self.scores(outputs[0])}

    def measures(self, expected: Sequence[Array], outputs: Sequence[Array]) -> dict[str, float]:
        """Compute the errors of logits [n, classes] (docs/precision.md).

        `score` is the largest error that a score can have if no logit has a larger one than here: the scores of these
        few images may be near 0 and 1.
        """
        wanted, given = (each[0].astype(np.float64) for each in (expected, outputs))
        if self.each:
            return _errors_of_each(wanted, given)
        wanted, given = (logits - logits.mean(1, keepdims=True) for logits in (wanted, given))
        spread = wanted.std(1)
        best, second = np.sort(wanted, axis=1)[:, [-1, -2]].T if wanted.shape[1] > 1 else (wanted[:, 0], wanted[:, 0])
        sure = best - second > 0.5 * spread
        wrong = wanted.argmax(1) != given.argmax(1)
        errors = np.abs(wanted - given).max(1)
        norms = np.linalg.norm(wanted, axis=1) * np.linalg.norm(given, axis=1)
        return {
            "top1": float((wrong & sure).sum() / max(1, sure.sum())),
            "score": float(np.tanh(errors.max() / 2)),
            "cosine": float((1 - divided((wanted * given).sum(1), norms)).max()),
            "logit": float(divided(errors, spread).max()),
            "scale": scale_error(wanted, given),
        }


def _errors_of_each(wanted: Array, given: Array) -> dict[str, float]:
    scores, others = (sigmoid(each).astype(np.float64) for each in (wanted, given))
    sure = np.abs(scores - 0.5) > _SURE
    wrong = (scores > 0.5) != (others > 0.5)
    within = (wanted > _LOWEST) & (wanted < _HIGHEST)
    scale = scale_error(wanted[within], given[within]) if wanted[within].any() else 0.0
    wanted, given = (each.clip(_LOWEST, _HIGHEST) for each in (wanted, given))
    return {
        "class": float((wrong & sure).sum() / max(1, sure.sum())),
        "score": float(np.abs(scores - others).max()),
        "logit": in_deviations(wanted, given),
        "scale": scale,
    }


def sigmoid(logits: Array) -> Array:
    """Compute a stable sigmoid of each, float32."""
    logits = logits.astype(np.float32, copy=False)
    small = np.exp(-np.abs(logits))
    scores: Array = np.where(logits >= 0, 1, small) / (1 + small)
    return scores


def best_of(scores: Array, count: int) -> Array:
    """Return the numbers of the `count` highest scores of [classes], descending; equal scores by ascending number."""
    if not 0 < count < len(scores):
        every: Array = (-scores).argsort(kind="stable")
        return every[: max(count, 0)]
    # Only scores at least as high as the last wanted one are sorted: 5 of 1000 take 8 us, all of them 46.
    last = len(scores) - count
    parted = scores.copy()
    parted.partition(last)
    least = parted[last]
    candidates: Array = (scores >= least).nonzero()[0]
    if len(candidates) > count:  # Of scores equal to the last wanted one, only the first.
        above, equal = (scores > least).nonzero()[0], (scores == least).nonzero()[0]
        candidates = np.concatenate((above, equal[: count - len(above)]))
    order: Array = (-scores[candidates]).argsort(kind="stable")
    return candidates[order]


def best_of_all(logits: Array, counts: Sequence[int], score: Callable[[Array], Array]) -> list[Array] | None:
    """Find the best classes of each row of [n, classes]: float64 [2, count], numbers and scores. Return None if too
    many are wanted. `counts`: the number for each row; `score`: turns logits into scores.
    """
    most = min(max(counts, default=0), logits.shape[1])
    if not 0 < most <= _FEW or min(counts) <= 0:
        return None
    found = np.empty((len(logits), 2, most))
    if len(logits) == 1:  # For one row, the code for several takes longer.
        scores = score(logits[0])
        found[0, 0] = best = best_of(scores, most)
        found[0, 1] = scores[best]
    else:
        scores, rows = score(logits), np.arange(len(logits))
        for place in range(most):
            found[:, 0, place] = highest = scores.argmax(axis=1)  # argmax takes the first of equals.
            found[:, 1, place] = scores[rows, highest]
            scores[rows, highest] = -1
    found[:, 1].round(5, out=found[:, 1])
    return [each[:, :count] for each, count in zip(found, counts, strict=True)]


def best_in(sent: Sequence[Array], count: int, score: Callable[[Array], Array]) -> tuple[list[int], list[float]]:
    """Return numbers and scores of the best classes: as `best_of_all` found them for this `count`, or from logits."""
    if sent[-1].ndim == 2:
        classes, found = sent[-1].tolist()
        return [int(each) for each in classes], found
    scores = score(sent[0])
    best = best_of(scores, count)
    return best.tolist(), scores[best].astype(np.float64).round(5).tolist()
