"""The precision gate: an executable serves only if its answers are the network's.

    probes ─► the network in float32, eager, on the CPU ─► reference ┐
    probes ─► executable, at every batch size ─► outputs ────────────┴─► measures ─► within the limits, or refused
    int8: images it was not calibrated on ─► how much less often its answers are right ─► the same

Owns: what is measured, and the limits (docs/precision.md has the reasoning). Must not know engines or devices: they are
handed an executable's answers, whoever made it. Every measure is an error: 0 is perfect.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from app.precision.probes import Calibration
from backends import DEFAULTS, CompileOptions, EngineCache, Executable, LoadReport, WrongAnswersError
from models import Model, NormalisedModel, Options, PixelModel, TensorModel
from models.accuracy import as_boxes, map50, top1

log = logging.getLogger(__name__)

Array = npt.NDArray[Any]
Pixels = npt.NDArray[np.uint8]

# How far answers may be from float32's, by task and precision. docs/precision.md has the errors that were measured,
# half of these or less, and those of answers that lie: two classes exchanged, 5 % too much are beyond at least one.
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
# What int8 may lose of top-1 or mAP50 on held-out images, as shares.
LOSS_LIMITS = {"classify": ("top1_loss", 0.01), "detect": ("map50_loss", 0.02)}
_ANCHORS = 100  # Of each image, those with the highest scores: the others answer nothing.
_BLOCK = 1 << 20
_LEAST_SPREAD = 0.01  # Of an output's size.
_SAME_PLACE = 0.7  # Intersection over union of a detection and its counterpart.


class Gate:
    """A model's answers on its probes, and the comparison with them."""

    def __init__(
        self, model: Model, probes: Pixels, calibration: Calibration | None = None, cache: EngineCache | None = None
    ) -> None:
        """`probes`: uint8 [n, *model.input_shape]. `calibration` has the held-out images for int8.

        `cache`: where float32's answers and the verdicts on held-out images are kept from start to start.
        """
        self._model, self._probes, self._calibration = model, probes, calibration
        self._cache = cache
        self._network: Any = None

    def check(self, executable: Executable, report: LoadReport) -> Mapping[str, float]:
        """The largest error of each measure over all batch sizes. Raises WrongAnswersError, BackendError."""
        limits = LIMITS[self._model.task][report.precision]
        worst = dict.fromkeys(limits, 0.0)
        for size in executable.batch_sizes:
            outputs = _answers(executable.run, self._probes, size)
            if not self._model.may_be_infinite and not all(np.isfinite(output).all() for output in outputs):
                raise WrongAnswersError(f"its answers to batches of {size} are not all finite numbers")
            measured = measures(self._model, self._expected, outputs)
            for name, limit in limits.items():
                if not measured[name] <= limit:
                    raise WrongAnswersError(
                        f"its answers to batches of {size} are not the network's: the error {name} is "
                        f"{measured[name]:.3g}, and {limit:g} is allowed in {report.precision}"
                    )
                worst[name] = max(worst[name], measured[name])
        if report.precision == "int8" and self._calibration is not None:
            worst.update(self._checked_loss(executable, report, self._calibration))
        return worst

    @cached_property
    def _expected(self) -> tuple[Array, ...]:
        digest = hashlib.sha256(self._probes.tobytes()).hexdigest()
        parts = {"reference": "probes", "of": digest, **self._surroundings()}
        return self._kept(lambda: self._reference(self._probes), **parts)

    def _checked_loss(self, executable: Executable, report: LoadReport, calibration: Calibration) -> dict[str, float]:
        name, limit = LOSS_LIMITS[self._model.task]
        parts = {
            "loss": name,
            "of": calibration.key,
            "engine": report.engine,
            "version": report.version,
            **self._surroundings(),
        }
        (accuracies,) = self._kept(lambda: (self._accuracies(executable, calibration),), **parts)
        if not len(accuracies):
            return {}
        before, after = accuracies.tolist()
        log.info("%s: %s is %.4f in float32, %.4f in int8", self._model.name, name.partition("_")[0], before, after)
        if before - after > limit:
            raise WrongAnswersError(
                f"int8 loses {100 * (before - after):.1f} points of {name.partition('_')[0]} on images it was not "
                f"calibrated on, and {100 * limit:g} are allowed"
            )
        return {name: before - after}

    def _accuracies(self, executable: Executable, calibration: Calibration) -> Array:
        """In float32 and of the executable; empty where there are no images. Without truth, float32 is right."""
        held_out, model = calibration.held_out(), self._model
        if held_out is None:
            return np.empty(0)
        assert isinstance(model, PixelModel)
        detects = self._model.task == "detect"
        # Precision is an average over all thresholds.
        options = Options(score_threshold=0.001) if detects else Options()
        rows = range(len(held_out.pixels))

        def answers(outputs: Sequence[Array]) -> list[dict[str, Any]]:
            return [
                model.postprocess(model.reduce(outputs, row, options), held_out.placements[row], options)
                for row in rows
            ]

        expected = answers(self._reference(held_out.pixels))
        given = answers(_answers(executable.run, held_out.pixels, executable.batch_sizes[-1]))
        truth: Sequence[Any] = held_out.truth
        if not truth and detects:
            sure = Options().score_threshold
            truth = [as_boxes([one for one in each["detections"] if one["score"] >= sure]) for each in expected]
        elif not truth:
            truth = [each["classes"][0]["class_id"] for each in expected]
        accuracy = map50 if detects else top1
        accuracies: Array = np.nan_to_num(np.array([accuracy(truth, expected), accuracy(truth, given)]))
        return accuracies

    def _reference(self, items: Pixels) -> tuple[Array, ...]:
        """The network's outputs in float32, eager, on the CPU."""
        network = self._network = self._network or self._model.network()

        def run(items: Pixels) -> tuple[Array, ...]:
            return tuple(output.numpy() for output in network(torch.from_numpy(items)))

        # Of tensors item by item: what is taken for a batch may be no such thing in the network.
        size = self._model.batch_sizes((1,))[0] if isinstance(self._model, TensorModel) else min(8, len(items))
        with torch.inference_mode():
            return _answers(run, items, size)

    def _surroundings(self) -> dict[str, object]:
        key = "" if self._cache is None else weights_key(self._model)
        return {"key": key, "torch": torch.__version__, "cpu": torch.backends.cpu.get_cpu_capability()}

    def _kept(self, compute: Callable[[], tuple[Array, ...]], **parts: object) -> tuple[Array, ...]:
        """What `compute` returns, from the cache where it is there."""
        if self._cache is None or not parts["key"]:
            return compute()
        entry = self._cache.get(**parts)
        if entry is not None:
            with np.load(entry / "arrays.npz", allow_pickle=False) as arrays:
                return tuple(arrays[name] for name in arrays.files)
        computed = compute()
        self._cache.put(lambda folder: np.savez(folder / "arrays.npz", *computed), **parts)
        return computed


def _answers(run: Callable[[Pixels], tuple[Array, ...]], items: Pixels, size: int) -> tuple[Array, ...]:
    """The answers to all items, `size` at a time; the last batch is filled up from the beginning."""
    parts: list[tuple[Array, ...]] = []
    count = len(items)
    for first in range(0, count, size):
        rows = np.arange(first, first + size) % count
        outputs = run(np.ascontiguousarray(items[rows]))
        parts.append(tuple(output[: count - first].copy() for output in outputs))
    return tuple(np.concatenate(each) for each in zip(*parts, strict=True))


def compile_options(
    model: Model,
    probes: Pixels | None,
    calibration: Calibration | None,
    cache_dir: Path | None,
    *,
    quick: bool = False,
) -> CompileOptions:
    """What making a model ready needs: the gate (where there are probes), images for int8, a place to keep things."""
    cache = EngineCache(cache_dir / "engines") if cache_dir else None
    return CompileOptions(
        gate=DEFAULTS.gate if probes is None else Gate(model, probes, calibration, cache).check,
        calibration=calibration,
        cache_dir=cache_dir,
        key=weights_key(model) if cache_dir else "",
        calibration_key=calibration.key if calibration else "",
        quick=quick,
    )


def weights_key(model: Model) -> str:
    """What identifies a network on disk; empty where nothing does."""
    # An ONNX file may keep its weights in others, whose names it knows alone.
    if model.weights_file is None or model.architecture == "onnx":
        return ""
    status = os.stat(model.weights_file)
    digest = _digest(model.weights_file, status.st_size, status.st_mtime_ns)
    if isinstance(model, TensorModel):  # Its owner may declare other shapes for the same file.
        digest += hashlib.sha256(repr((model.inputs, model.batched)).encode()).hexdigest()
    return f"{model.architecture}-{len(model.labels)}-{digest}"


@lru_cache(maxsize=16)
def _digest(path: str, size_bytes: int, mtime_ns: int) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def measures(model: Model, expected: Sequence[Array], outputs: Sequence[Array]) -> dict[str, float]:
    """Errors of outputs [n, ...] against those expected of the same images; every one of them, limited or not."""
    if [output.shape for output in outputs] != [output.shape for output in expected]:
        return dict.fromkeys(LIMITS[model.task]["fp32"], float("inf"))
    if isinstance(model, PixelModel | NormalisedModel):
        model = model.image_model
        return (_classification if model.task == "classify" else _detection)(model, expected, outputs)
    return _tensors(expected, outputs)


def _classification(_: PixelModel, expected: Sequence[Array], outputs: Sequence[Array]) -> dict[str, float]:
    """`top1`: images whose class is another, of those where the network is sure; `cosine`: 1 - the cosine of the
    logits without their mean, which the softmax does not see; `logit`: the largest error, in standard deviations of the
    image's logits; `scale`: how much all logits are too large or too small.
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


def _detection(model: PixelModel, expected: Sequence[Array], outputs: Sequence[Array]) -> dict[str, float]:
    """On the anchors with the highest scores. `class`: anchors whose class is another, by the share of their score;
    `score`: the largest error of a score; `box`: the largest of a box's side, in strides of its anchor, of anchors that
    would be answered; `scale`: how much all distances are too large or too small; `missed`: detections that the network
    has and these outputs have not, or the other way round.
    """
    rows = np.arange(len(expected[0]))[:, None]
    top = np.argsort(-expected[1], axis=1)[:, :_ANCHORS]
    (distances, scores, classes), (given_distances, given_scores, given_classes) = (
        tuple(output[rows, top].astype(np.float64) for output in each) for each in (expected, outputs)
    )
    answered = scores > Options().score_threshold
    # A box of which nobody is sure may lie anywhere: its error counts by its score.
    errors = np.abs(distances - given_distances).max(2) * np.minimum(1, scores / Options().score_threshold)
    return {
        "class": float(_divided((scores * (classes != given_classes)).sum(), scores.sum())),
        "score": float(np.abs(scores - given_scores).max()),
        "box": float(errors.max()),
        "scale": _scale(*((each[answered] if answered.any() else each) for each in (distances, given_distances))),
        "missed": _missed(model, expected, outputs),
    }


def _tensors(expected: Sequence[Array], outputs: Sequence[Array]) -> dict[str, float]:
    """The worst output of each measure. `cosine`: 1 - the cosine of an item's numbers; `error`: the largest error, in
    standard deviations of the output over all probes; `scale`: how much all numbers are too large or too small;
    `different`: whole numbers that are others; 1 where NaN or infinity are in other places.
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
    # An output that hardly varies is measured by its size: else its last bits would decide.
    spread = max(float(wanted.std()), _LEAST_SPREAD * float(np.sqrt((wanted**2).mean())))
    norms = np.linalg.norm(wanted, axis=1) * np.linalg.norm(given, axis=1)
    return {
        "cosine": float((1 - _divided((wanted * given).sum(1), norms))[norms > 0].max(initial=0.0)),
        "error": float(_divided(np.abs(wanted - given).max(), spread)),
        "scale": _scale(wanted, given) if wanted.any() else 0.0,
        "different": float(strange.any()),
    }


def _missed(model: PixelModel, expected: Sequence[Array], outputs: Sequence[Array]) -> float:
    """Of detections far enough above the threshold that rounding does not decide; in either direction."""
    missed = sure = 0
    for one, other in ((expected, outputs), (outputs, expected)):
        for row in range(len(one[0])):
            there = _detections(model, other, row, Options(score_threshold=0.15))
            for label, box in _detections(model, one, row, Options(score_threshold=0.4)):
                sure += 1
                missed += not any(label == name and _overlap(box, place) >= _SAME_PLACE for name, place in there)
    return missed / max(1, sure)


def _detections(model: PixelModel, outputs: Sequence[Array], row: int, options: Options) -> list[tuple[int, Array]]:
    from models import Placement

    height, width = model.input_shape[:2]
    answer = model.postprocess(model.reduce(outputs, row, options), Placement(width, height), options)
    return [(found["class_id"], np.array([*found["box"].values()])) for found in answer["detections"]]


def _overlap(one: Array, other: Array) -> float:
    sides = np.minimum(one[2:], other[2:]) - np.maximum(one[:2], other[:2])
    shared = float(sides.clip(0).prod())
    whole = float((one[2:] - one[:2]).prod() + (other[2:] - other[:2]).prod()) - shared
    return shared / whole if whole > 0 else 0.0


def _scale(wanted: Array, given: Array) -> float:
    # The factor that fits best: noise averages out of it, a systematic drift does not.
    return float(abs(_divided((wanted * given).sum(), (wanted * wanted).sum()) - 1))


def _divided(numerator: Any, denominator: Any) -> Any:
    """0 / 0 is 0: a network that answers nothing, answered with nothing, is no error."""
    numerator, denominator = np.asarray(numerator, np.float64), np.asarray(denominator, np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where((numerator == 0) & (denominator == 0), 0.0, numerator / denominator)
