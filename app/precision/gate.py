"""Precision gate: an executable serves only if its outputs agree with the network's own in float32.

    probes ─► the network in float32, eager, on the CPU ─► reference ┐
    probes ─► executable, at every batch size ─► outputs ────────────┴─► measures ─► within the limits, or refused
    int8: images it was not calibrated on ─► loss of accuracy against float32 ─► within the limit, or refused

Owns: running the reference and the executable, keeping the reference's outputs from start to start, and the limit of
int8's loss. A model's `errors` compares. Must not know engines or devices: it sees an executable's outputs. It knows
only that `eager` in float32 is the last engine.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from app.precision.described import weights_key
from app.precision.probes import Calibration
from backends import DEFAULTS, CompileOptions, EngineCache, Executable, LoadReport, WrongAnswersError
from models import Model, PixelModel, TensorModel

log = logging.getLogger(__name__)

Array = npt.NDArray[Any]
Pixels = npt.NDArray[np.uint8]


class Gate:
    """Gate that checks executables of one model against the float32 reference."""

    def __init__(
        self, model: Model, probes: Pixels, calibration: Calibration | None = None, cache: EngineCache | None = None
    ) -> None:
        """Prepare a gate. `probes`: uint8 [n, *model.input_shape]. `calibration`: has the held-out images for int8.

        `cache`: keeps the reference's outputs and int8's accuracies from start to start.
        """
        self._model, self._probes, self._calibration = model, probes, calibration
        self._cache = cache
        self._network: Any = None

    def check(self, executable: Executable, report: LoadReport) -> Mapping[str, float]:
        """Return the largest error of each measure over all batch sizes.

        Raises WrongAnswersError if an error is over its limit, and BackendError of the executable itself.
        """
        limits = self._model.limits.get(report.precision)
        if limits is None:
            raise WrongAnswersError(f"what {report.precision} does to a task of its own kind cannot be judged")
        worst, refusal = dict.fromkeys(limits, 0.0), ""
        alone: tuple[Array, ...] = ()
        for size in executable.batch_sizes:
            outputs = outputs_of(executable.run, self._probes, size)
            if not self._model.may_be_infinite and not all(np.isfinite(output).all() for output in outputs):
                raise WrongAnswersError(f"its answers to batches of {size} are not all finite numbers")
            if not self._model.has_reference and size == executable.batch_sizes[0]:
                alone = outputs  # A finished file is compared with itself: every size has to answer alike.
            measured = self._model.errors(self._expected if self._model.has_reference else alone, outputs)
            what = f"its answers to batches of {size} are not the network's"
            worst = {name: max(error, measured[name]) for name, error in worst.items()}
            try:
                _refuse_over(limits, measured, what, f" in {report.precision}")
            except WrongAnswersError as error:
                if not self._is_last(executable, report, measured):
                    raise
                refusal = str(error)
        if refusal:
            log.warning(
                "%s is served by %s in float32 though %s. Candidates that are nearly equal may have changed places: "
                "compare its answers on your own images. All errors: %s",
                *(
                    self._model.weights,
                    report.engine,
                    refusal,
                    {name: float(f"{error:.3g}") for name, error in worst.items()},
                ),
            )
        if report.precision == "int8" and self._calibration is not None:
            worst.update(self._checked_loss(executable, report, self._calibration))
        return worst

    def _is_last(self, executable: Executable, report: LoadReport, measured: Mapping[str, float]) -> bool:
        """Return True if no other engine can serve a user's own file: `eager` in float32, as the reference, or OpenVINO
        for its own files. On a device other than the reference's it must be as good as the coarsest precision that is
        served.
        """
        engine = "openvino" if self._model.weights.endswith(".xml") else "eager"
        own = not isinstance(self._model, TensorModel) and self._model.weights not in ("official", "sample", "random")
        if not own or (report.engine, report.precision) != (engine, "fp32"):
            return False
        limits = _coarsest(self._model)
        return executable.device.startswith("cpu") or all(measured[name] <= limit for name, limit in limits.items())

    @cached_property
    def _expected(self) -> tuple[Array, ...]:
        digest = hashlib.sha256(self._probes.tobytes()).hexdigest()
        parts = {"reference": "probes", "of": digest, **self._surroundings()}
        return self._kept(lambda: self._reference(self._probes), **parts)

    def _checked_loss(self, executable: Executable, report: LoadReport, calibration: Calibration) -> dict[str, float]:
        assert isinstance(self._model, PixelModel)
        accuracy = self._model.accuracy
        if accuracy is None:
            raise WrongAnswersError(
                f"what int8 costs is unknown, as {self._model.task} does not say how right answers are"
            )
        name, limit = f"{accuracy.name}_loss", accuracy.loss_limit
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
        log.info("%s: %s is %.4f in float32, %.4f in int8", self._model.name, accuracy.name, before, after)
        if before - after > limit:
            raise WrongAnswersError(
                f"int8 loses {100 * (before - after):.1f} points of {accuracy.name} on images it was not "
                f"calibrated on, and {100 * limit:g} are allowed"
            )
        return {name: before - after}

    def _accuracies(self, executable: Executable, calibration: Calibration) -> Array:
        """Return the accuracy in float32 and of the executable, float64 [2]; [0] without held-out images.

        Without labels, float32's predictions are the reference.
        """
        held_out, model = calibration.held_out(), self._model
        if held_out is None:
            return np.empty(0)
        assert isinstance(model, PixelModel)
        accuracy = model.accuracy
        assert accuracy is not None
        options = accuracy.options
        rows = range(len(held_out.pixels))

        def answers(outputs: Sequence[Array]) -> list[dict[str, Any]]:
            return [
                model.postprocess(model.reduce(outputs, row, options), held_out.placements[row], options)
                for row in rows
            ]

        expected = answers(self._reference(held_out.pixels))
        given = answers(outputs_of(executable.run, held_out.pixels, executable.batch_sizes[-1]))
        truth: Sequence[Any] = held_out.truth or [accuracy.truth(each) for each in expected]
        accuracies: Array = np.nan_to_num(np.array([accuracy.of(truth, each) for each in (expected, given)]))
        return accuracies

    def _reference(self, items: Pixels) -> tuple[Array, ...]:
        """Return the network's outputs in float32, eager, on the CPU."""
        network = self._network = self._network or self._model.network()

        def run(items: Pixels) -> tuple[Array, ...]:
            return tuple(output.numpy() for output in network(torch.from_numpy(items)))

        # Tensor models run item by item: the network may mix the items of what we take for a batch.
        wanted = 1 if isinstance(self._model, TensorModel) else min(8, len(items))
        size = self._model.batch_sizes((wanted,))[0]
        with torch.inference_mode():
            return outputs_of(run, items, size)

    def _surroundings(self) -> dict[str, object]:
        key = "" if self._cache is None else weights_key(self._model)
        return {"key": key, "torch": torch.__version__, "cpu": torch.backends.cpu.get_cpu_capability()}

    def _kept(self, compute: Callable[[], tuple[Array, ...]], **parts: object) -> tuple[Array, ...]:
        """Return the result of `compute`, from the cache if it is there. `parts`: what the arrays depend on."""
        if self._cache is None or not parts["key"]:
            return compute()
        entry = self._cache.get(**parts)
        if entry is not None:
            with np.load(entry / "arrays.npz", allow_pickle=False) as arrays:
                return tuple(arrays[name] for name in arrays.files)
        computed = compute()
        self._cache.put(lambda folder: np.savez(folder / "arrays.npz", *computed), **parts)
        return computed


def _refuse_over(limits: Mapping[str, float], measured: Mapping[str, float], what: str, where: str = "") -> None:
    """Raise WrongAnswersError if an error is over its limit."""
    for name, limit in limits.items():
        if not measured[name] <= limit:
            raise WrongAnswersError(
                f"{what}: the error {name} is {measured[name]:.3g}, and {limit:g} is allowed{where}"
            )


def _coarsest(model: Model) -> Mapping[str, float]:
    """Return the limits of the coarsest precision that the model is served in."""
    return next(model.limits[name] for name in ("int8", "bf16", "fp16", "fp32") if name in model.limits)


def errors_of_decoding(model: PixelModel, executable: Executable, host: Pixels, device: Pixels) -> Mapping[str, float]:
    """Return the largest errors of answers to pixels that the device decoded, against those to the host's pixels.

    Two decoders of JPEG differ by grey levels, so the limits of a float32 network do not apply. The limits are those of
    int8, the coarsest that is served. On the sample networks and images libjpeg's own quick upsampling, which is about
    what nvJPEG does, takes a tenth of the limit of a classifier's logits and half of the limit of a detector's scores;
    exchanged colours exceed them. Raises WrongAnswersError if one is over its limit, and BackendError of the executable
    itself.
    """
    size = executable.batch_sizes[-1]
    expected, given = (outputs_of(executable.run, pixels, size) for pixels in (host, device))
    found = model.errors(expected, given)
    _refuse_over(_coarsest(model), found, "the answers to images that the device decodes are others")
    return found


def outputs_of(run: Callable[[Pixels], tuple[Array, ...]], items: Pixels, size: int) -> tuple[Array, ...]:
    """Return the outputs for all items, run in batches of `size`. The first items fill up the last batch."""
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
    """Return the options for an engine: the gate (if there are probes), images for int8, a cache folder."""
    cache = EngineCache(cache_dir / "engines") if cache_dir else None
    return CompileOptions(
        gate=DEFAULTS.gate if probes is None else Gate(model, probes, calibration, cache).check,
        calibration=calibration,
        cache_dir=cache_dir,
        key=weights_key(model) if cache_dir else "",
        calibration_key=calibration.key if calibration else "",
        quick=quick,
    )
