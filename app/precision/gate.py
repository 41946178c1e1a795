"""Precision gate: an executable serves only if its outputs agree with the network's own in float32.

    probes ─► the network in float32, eager, on the CPU ─► reference ┐
    probes ─► executable, at every batch size ─► outputs ────────────┴─► measures ─► within the limits, or refused
    int8: images it was not calibrated on ─► loss of accuracy against float32 ─► within the limit, or refused
    network, probes, device, versions, engine, precision, batch sizes ─► an entry of EngineCache ─► Verdict

Owns: running the reference and the executable, keeping the reference's outputs and the verdicts from start to start,
and the limit of int8's loss. A model's `errors` compares. Must not know engines or devices: it sees an executable's
outputs. It knows only that `eager` in float32 is the last engine.

A kept verdict decides about speed alone (docs/precision.md): of a refused engine that nobody else can replace, and of
one that was accepted, the gate looks at the answers again. So whoever can write to the cache, as a confined worker can
to its own, makes no wrong answer right.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import torch

from app.precision.described import weights_key
from app.precision.probes import Calibration, Pixels
from backends import CompileOptions, EngineCache, EngineRefusal, Executable, LoadReport, Network, WrongAnswersError
from models import Model, PixelModel, TensorModel
from models.contract.files import digest_of_sources
from models.contract.model import Array

_FILE = "verdict.msgpack"
_OWN_CODE = ("app.precision", "backends", "models")
_Text = Annotated[str, msgspec.Meta(max_length=4000)]


class Verdict(msgspec.Struct, frozen=True):
    """Verdict on an engine in one precision. `reason`: of a refusal, else ""; `wrong`: its answers were, else it could
    not convert the network. `measures`: the largest errors of one that was accepted; `excuse`: what is over a limit
    although it serves; `date`: of the comparison; `seconds`: the shortest of a batch, by size.
    """

    date: Annotated[str, msgspec.Meta(max_length=10)]
    reason: _Text = ""
    wrong: bool = True
    measures: Annotated[dict[_Text, float], msgspec.Meta(max_length=64)] = {}
    excuse: _Text = ""
    seconds: Annotated[dict[int, float], msgspec.Meta(max_length=64)] = {}


@dataclass(frozen=True)
class Verdicts:
    """Verdicts on one network, on one kind of device. `of`: what they depend on beside the code and its libraries."""

    cache: EngineCache
    of: Mapping[str, object]

    def get(self, engine: str, precision: str, sizes: Sequence[int]) -> Verdict | None:
        """Return a verdict; None if there is none that can be read."""
        entry = self.cache.get(**self._parts(engine, precision, sizes))
        if entry is not None:
            with contextlib.suppress(OSError, msgspec.DecodeError):
                return msgspec.msgpack.decode((entry / _FILE).read_bytes(), type=Verdict)
        return None

    def put(self, engine: str, precision: str, sizes: Sequence[int], verdict: Verdict) -> None:
        """Keep a verdict, in place of an earlier one."""
        parts = self._parts(engine, precision, sizes)
        if (entry := self.cache.get(**parts)) is not None:
            shutil.rmtree(entry, ignore_errors=True)
        self.cache.put(lambda folder: (folder / _FILE).write_bytes(msgspec.msgpack.encode(verdict)), **parts)

    def _parts(self, engine: str, precision: str, sizes: Sequence[int]) -> dict[str, object]:
        asked = {"verdict on": engine, "precision": precision, "sizes": tuple(sizes)}
        return {**asked, **self.of, "computed by": what_computes()}


def today() -> str:
    """Return the date of a verdict made now."""
    return time.strftime("%Y-%m-%d")


@cache
def what_computes() -> str:
    """Hash our own code, and the name and version of every installed package: any of them may compute otherwise.

    A process that is to be confined asks before: afterwards it may not see all of them.
    """
    found = {sys.version}
    for folder in sys.path:
        with contextlib.suppress(OSError):
            found.update(each for each in os.listdir(folder or ".") if each.endswith((".dist-info", ".egg-info")))
    text = repr([sorted(found), [digest_of_sources(package) for package in _OWN_CODE]])
    return hashlib.sha256(text.encode()).hexdigest()


log = logging.getLogger(__name__)


_SLOW_S = 0.1
"""Seconds from which on a batch is not run only to be warm: it is on a CPU, where the first one is hardly slower."""


class Gate:
    """Gate that checks executables of one model against the float32 reference."""

    def __init__(
        self,
        model: Model,
        probes: Pixels,
        calibration: Calibration | None = None,
        cache: EngineCache | None = None,
        verdicts: Verdicts | None = None,
    ) -> None:
        """Prepare a gate. `probes`: uint8 [n, *model.input_shape]. `calibration`: has the held-out images for int8.

        `cache`: keeps the reference's outputs and int8's accuracies from start to start; `verdicts`: the verdicts.
        """
        self._model, self._probes, self._calibration = model, probes, calibration
        self._cache, self._verdicts = cache, verdicts
        self._network: Any = None

    def refused(self, engine: str, precision: str, sizes: Sequence[int]) -> EngineRefusal | None:
        """Return how an engine was refused before; None if it was not, or if nobody knows."""
        kept = self._verdicts.get(engine, precision, sizes) if self._verdicts else None
        if kept is None or not kept.reason:
            return None
        return EngineRefusal(f"{kept.reason} (found on {kept.date})", kept.wrong)

    def unfit(self, engine: str, precision: str, sizes: Sequence[int], reason: str) -> None:
        """Keep that an engine cannot convert the network."""
        if self._verdicts:
            self._verdicts.put(engine, precision, sizes, Verdict(today(), reason, wrong=False))

    def check(self, executable: Executable, report: LoadReport) -> Mapping[str, float]:
        """Return the largest error of each measure over all batch sizes.

        Raises WrongAnswersError if an error is over its limit, and BackendError of the executable itself.
        """
        measures, excuse = self._found(executable, report)
        if excuse:
            log.warning(
                "%s is served by %s in float32 though %s. Candidates that are nearly equal may have changed places: "
                "compare its answers on your own images. All errors: %s",
                *(
                    self._model.weights,
                    report.engine,
                    excuse,
                    {name: float(f"{error:.3g}") for name, error in measures.items()},
                ),
            )
        return measures

    def _found(self, executable: Executable, report: LoadReport) -> tuple[dict[str, float], str]:
        """Compare as much as an earlier verdict leaves to do, and keep the verdict. Return and raise as `_compared`."""
        verdicts, asked = self._verdicts, (report.engine, report.precision, executable.batch_sizes)
        if verdicts is None:
            return self._compared(executable, report, None)
        # A finished file is compared with itself, of which one batch says nothing.
        before = verdicts.get(*asked) if self._model.has_reference else None
        before = None if before is None or before.reason else before
        try:
            measures, excuse = self._compared(executable, report, before)
        except WrongAnswersError as error:
            verdicts.put(*asked, Verdict(today(), str(error)))
            raise
        if before is None:
            verdicts.put(*asked, Verdict(today(), measures=measures, excuse=excuse, seconds=dict(executable.fastest_s)))
            return measures, excuse
        log.info(
            "%s: what %s answers in %s was compared on %s, and is now compared with one batch of a size",
            *(self._model.name, report.engine, report.precision, before.date),
        )
        measures = {name: max(error, before.measures.get(name, 0.0)) for name, error in measures.items()}
        return measures, excuse or before.excuse

    def _compared(
        self, executable: Executable, report: LoadReport, before: Verdict | None
    ) -> tuple[dict[str, float], str]:
        """Compare all sizes, and what int8 loses. Return the largest errors, and what is over a limit though it serves.

        `before`: an earlier verdict, with which one batch of a size is compared, not all probes. Sizes between the
        smallest and the largest are left out if they take long; their times follow from those of these two.
        Raises the errors of `check`.
        """
        limits = self._model.limits.get(report.precision)
        if limits is None:
            raise WrongAnswersError(f"{self._model.name} is not served in {report.precision}")
        worst, excuse = dict.fromkeys(limits, 0.0), ""
        alone: tuple[Array, ...] = ()
        left_out = [] if before is None else _slow_between(before.seconds, executable.batch_sizes)
        for size in executable.batch_sizes:
            if size in left_out:
                continue
            probes = self._probes if before is None else self._probes[:size]
            outputs = outputs_of(executable.run, probes, size)
            if not self._model.may_be_infinite and not all(np.isfinite(output).all() for output in outputs):
                raise WrongAnswersError(f"its answers to batches of {size} are not all finite numbers (scores up to 1)")
            if not self._model.has_reference and size == executable.batch_sizes[0]:
                alone = outputs  # A finished file is compared with itself: every size has to answer alike.
            expected = self._expected if self._model.has_reference else alone
            measured = self._model.errors(tuple(each[: len(probes)] for each in expected), outputs)
            what = f"its answers to batches of {size} are not the network's"
            worst = {name: max(error, measured[name]) for name, error in worst.items()}
            try:
                _refuse_over(limits, measured, what, f" in {report.precision}")
            except WrongAnswersError as error:
                if not self._is_last(executable, report, measured):
                    raise
                excuse = str(error)
        if before is not None and left_out:
            # The quicker of the two: a first run may have waited for memory, and what seems slow is measured again.
            pace = min(taken_s / before.seconds[size] for size, taken_s in executable.fastest_s.items())
            executable.fastest_s.update({size: pace * before.seconds[size] for size in left_out})
        if report.precision == "int8" and self._calibration is not None:
            worst.update(self._checked_loss(executable, report, self._calibration))
        return worst, excuse

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

        Float32's predictions are the reference.
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
        truth = [accuracy.truth(each) for each in expected]
        accuracies: Array = np.nan_to_num(np.array([accuracy.of(truth, each) for each in (expected, given)]))
        return accuracies

    def _reference(self, items: Pixels) -> tuple[Array, ...]:
        self._network = self._network or self._model.network()
        # Tensor models run item by item: the network may mix the items of what we take for a batch.
        wanted = 1 if isinstance(self._model, TensorModel) else min(8, len(items))
        size = self._model.batch_sizes((wanted,))[0]
        return outputs_of(partial(on_cpu, self._network), items, size)

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


def _slow_between(seconds: Mapping[int, float], sizes: Sequence[int]) -> list[int]:
    if any(not 0 < seconds.get(size, 0.0) < math.inf for size in sizes):
        return []
    return [size for size in sizes[1:-1] if seconds[size] >= _SLOW_S]


def _refuse_over(limits: Mapping[str, float], measured: Mapping[str, float], what: str, where: str = "") -> None:
    for name, limit in limits.items():
        if not measured[name] <= limit:
            raise WrongAnswersError(
                f"{what}: the error {name} is {measured[name]:.3g}, and {limit:g} is allowed{where}"
            )


def _coarsest(model: Model) -> Mapping[str, float]:
    return next(model.limits[name] for name in ("int8", "bf16", "fp16", "fp32") if name in model.limits)


def errors_of_decoding(model: PixelModel, executable: Executable, host: Pixels, device: Pixels) -> Mapping[str, float]:
    """Return the largest errors of answers to pixels that the device decoded, against those to the host's pixels.

    Two decoders of JPEG differ by grey levels, so the limits are those of int8, the coarsest that is served; exchanged
    colours exceed them. Raises WrongAnswersError if one is over its limit, and BackendError of the executable itself.
    """
    size = executable.batch_sizes[-1]
    expected, given = (outputs_of(executable.run, pixels, size) for pixels in (host, device))
    found = model.errors(expected, given)
    _refuse_over(_coarsest(model), found, "the answers to images that the device decodes are others")
    return found


def on_cpu(network: Network, items: Pixels) -> tuple[Array, ...]:
    """Compute the network's answers in float32, eager, on the CPU."""
    with torch.inference_mode():
        return tuple(output.numpy() for output in network(torch.from_numpy(items)))


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
    device: Sequence[object] = (),
) -> CompileOptions:
    """Return the options for an engine: the gate (if there are probes), images for int8, a cache folder.

    `device`: what identifies the kind of device, its driver and what else its answers depend on; with it verdicts are
    kept.
    """
    cache = EngineCache(cache_dir / "engines") if cache_dir else None
    key = weights_key(model) if cache_dir else ""
    calibration_key = calibration.key if calibration else ""
    options = CompileOptions(
        calibration=calibration, cache_dir=cache_dir, key=key, calibration_key=calibration_key, quick=quick
    )
    if probes is None:
        return options
    verdicts = None
    if cache is not None and key and device:
        seen = hashlib.sha256(probes.tobytes()).hexdigest()
        of = {"key": key, "device": tuple(device), "probes": seen, "images": calibration_key}
        verdicts = Verdicts(cache, of)
    gate = Gate(model, probes, calibration, cache, verdicts)
    return replace(options, gate=gate.check, refused=gate.refused, unfit=gate.unfit)
