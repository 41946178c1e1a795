"""Comparison of a model's answers on a device with float32 on the CPU, by engine and precision.

    reference ─┬─► whole answers: errors, agreement of classes or boxes, the gate's verdict
               ├─► layer by layer, as PyTorch runs it on the device
               └─► where an engine differs: the network cut in halves, until the layer is found

Owns: the order of these comparisons and their verdicts. Must not know how they are shown.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from anychip_tools.validation.difference import LAYER_LIMITS, PREFIX_LIMITS, TOLERANCES, Difference, difference
from anychip_tools.validation.files import OnnxLayers
from anychip_tools.validation.traced import Layer, LayerError, LayerTracingError, TracedNetwork
from app.precision.gate import outputs_of
from backends import Backend, BackendError, CompileOptions, EngineRefusedError, Executable, OutOfDeviceMemoryError
from backends.engines.engine import DTYPES
from backends.vendors.torch_device import torch_device
from models import Model, Options, PixelModel, Placement, TensorModel

log = logging.getLogger(__name__)

Array = npt.NDArray[Any]


@dataclass
class Comparison:
    """Result of one engine in one precision. `verdict`: "agrees", or "differs" or "refused" with the `reason`.

    `errors`: the precision gate's, `limits`: its limits; `agreement`: of what people see. `culprit`: the first
    layer of the engine that differs, if it was searched; `cut_note`: why it was not, or how sure it is.
    """

    engine: str
    precision: str
    verdict: str
    reason: str = ""
    whole: Difference | None = None
    errors: dict[str, float] = field(default_factory=dict)
    limits: dict[str, float] = field(default_factory=dict)
    agreement: dict[str, float] = field(default_factory=dict)
    accuracy: dict[str, float] = field(default_factory=dict)
    culprit: Layer | None = None
    cut_note: str = ""


@dataclass
class Depth:
    """Errors layer by layer in one precision. `first`: the first layer whose own error is over the limit."""

    precision: str
    layers: list[LayerError]
    first: LayerError | None
    limit: float
    note: str = ""


class Validation:
    """Validation of one model on one device."""

    def __init__(
        self,
        model: Model,
        backend: Backend,
        device: str,
        items: npt.NDArray[np.uint8],
        *,
        folder: Path,
        calibration: Callable[[], Any] | None = None,
        reference: Model | None = None,
    ) -> None:
        """Compute the reference. `items`: uint8 [n, *input_shape]. `folder`: for temporary files. `reference`:
        a correct model of the same inputs and outputs; by default the model itself, in float32 on the CPU.
        """
        self.model, self.reference = model, reference or model
        self._backend, self._device, self._items, self._folder = backend, device, items, folder
        self._calibration = calibration
        self._batch = 1 if isinstance(model, TensorModel) and not model.batched else 2
        self._expected = outputs_of(_in_float32(self.reference), items, self._batch)
        self._layers: TracedNetwork | OnnxLayers | None = None
        self._truth: TracedNetwork | OnnxLayers | None = None
        self.untraceable = ""

    def compared(
        self,
        engine: str,
        precision: str,
        *,
        accuracy: Callable[[Executable], dict[str, float]] | None = None,
        cut: bool = True,
    ) -> Comparison:
        """Load, run, compare; if it differs, find the layer. Raises OutOfDeviceMemoryError, DeviceLostError."""
        try:
            executable, used = self._loaded(self.model.network(), engine, precision)
        except EngineRefusedError as error:
            return Comparison(engine, precision, "refused", str(error))
        try:
            outputs = outputs_of(executable.run, self._items, self._batch)
            found = self._judged(used, precision, outputs)
            if accuracy is not None:
                found.accuracy = accuracy(executable)
        except (OutOfDeviceMemoryError, EngineRefusedError):
            raise
        except BackendError as error:
            return Comparison(used, precision, "differs", f"it fails: {error}")
        finally:
            executable.close()
        if found.verdict == "differs" and cut:
            self._cut(found)
        return found

    def depth(self, precision: str) -> Depth:
        """Compare each layer as PyTorch runs it on the device; for ONNX files of tensors, with the reference's file."""
        limit = LAYER_LIMITS[precision]
        try:
            layers = self._traced()
            if isinstance(layers, OnnxLayers):
                return self._depth_of_files(layers, limit)
            target = torch_device(self._backend, self._device)
            truth = self._truth if isinstance(self._truth, TracedNetwork) else layers
            errors = layers.errors(
                self._items[: layers.batch], DTYPES[precision], target, TOLERANCES[precision], truth=truth
            )
        except LayerTracingError as error:
            self.untraceable = str(error)
            return Depth(precision, [], None, limit, f"not layer by layer: {error}")
        except Exception as error:  # A device may lack an operator, or memory.
            return Depth(precision, [], None, limit, f"not layer by layer: {str(error).splitlines()[0][:200]}")
        first = next((each for each in errors if not each.alone.relative <= limit), None)
        return Depth(precision, errors, first, limit)

    def _depth_of_files(self, layers: OnnxLayers, limit: float) -> Depth:
        if self.reference is self.model:
            return Depth("fp32", [], None, limit, "the file is its own reference; engines are compared by cutting it")
        assert isinstance(self._truth, OnnxLayers)
        expected, given = (each.values(self._items[: self._batch]) for each in (self._truth, layers))
        errors = []
        for layer in self._truth.layers:
            if layer.name in given:
                found = difference([expected[layer.name]], [given[layer.name]], TOLERANCES["fp32"])
                errors.append(LayerError(layer, found, found))
        first = next((each for each in errors if not each.sum.relative <= limit), None)
        return Depth("fp32", errors, first, limit)

    def _judged(self, engine: str, precision: str, outputs: tuple[Array, ...]) -> Comparison:
        limits = self.model.limits.get(precision, {})
        errors = self.model.errors(self._expected, outputs)
        tolerance = TOLERANCES[precision]
        whole = difference(self._expected, outputs, tolerance)
        finite = self.model.may_be_infinite or all(
            np.isfinite(each).all() for each in outputs if each.dtype.kind == "f"
        )
        over = [name for name, limit in limits.items() if not errors[name] <= limit]
        reasons = [] if finite else ["its answers are not all finite numbers"]
        if over:
            said = ", ".join(f"{name} is {errors[name]:.3g} and {limits[name]:g} is allowed" for name in over)
            reasons.append(f"the error {said}")
        verdict = "differs" if reasons else "agrees"
        agreement = agreement_of(self.model, self._expected, outputs)
        return Comparison(engine, precision, verdict, "; ".join(reasons), whole, dict(errors), dict(limits), agreement)

    def _cut(self, found: Comparison) -> None:
        """Find the first layer at which a network that ends there is wrong on this engine."""
        items = self._items[: self._batch]
        try:
            layers = self._traced()
            values: dict[str, Any] = dict((self._truth or layers).values(items))
        except LayerTracingError as error:
            found.cut_note = f"it cannot be cut: {error}"
            return
        limit, refused = PREFIX_LIMITS[found.precision], [0]

        ends = [layer for layer in layers.layers if layer.ends_batch]

        def agrees(number: int) -> bool | None:
            layer = ends[number]
            if layer.name not in values:
                return None
            expected = np.asarray(values[layer.name]).astype(np.float32).reshape(len(items), -1)
            try:
                executable, _ = self._loaded(layers.prefix(layer), found.engine, found.precision)
            except (EngineRefusedError, LayerTracingError) as error:
                log.debug("cut at %s: %s", layer.title, error)
                refused[0] += 1
                return None
            try:
                (given,) = executable.run(np.ascontiguousarray(items))
            except BackendError:
                return False
            finally:
                executable.close()
            given = given.astype(np.float32).reshape(len(items), -1)
            return difference([expected], [given], TOLERANCES[found.precision]).relative <= limit

        number = first_wrong(len(ends), agrees)
        if number is not None:
            found.culprit = ends[number]
            last = number == len(ends) - 1
            found.cut_note = (
                "no earlier cut differs: the end of the network, or the sum of small errors" if last else ""
            )
            if refused[0]:
                found.cut_note += f" ({refused[0]} cuts were refused by the engine)"

    def _loaded(self, network: Any, engine: str, precision: str) -> tuple[Executable, str]:
        options = CompileOptions(calibration=self._calibration)
        executable, report = self._backend.load(
            network, self._device, engine, precision, (self._batch,), options=options
        )
        return executable, report.engine

    def _traced(self) -> TracedNetwork | OnnxLayers:
        if self.untraceable:
            raise LayerTracingError(self.untraceable)
        if self._layers is None:
            self._layers = layers_of(self.model, self._batch, self._folder / "model")
            if self.reference is not self.model:
                self._truth = layers_of(self.reference, self._batch, self._folder / "reference")
        return self._layers


def layers_of(model: Model, batch: int, folder: Path) -> TracedNetwork | OnnxLayers:
    """Return a model's layers, traced or from its file. Raises LayerTracingError."""
    network = model.network()
    if getattr(network, "form", "pixels") == "onnx" and isinstance(model, TensorModel):
        folder.mkdir(parents=True, exist_ok=True)
        return OnnxLayers(model, folder)
    if getattr(network, "form", "pixels") == "script":
        raise LayerTracingError("TorchScript cannot be traced: export a .pt2 or .onnx to see its layers")
    return TracedNetwork(model.network, model.input_shape, batch)


def agreement_of(model: Model, expected: Sequence[Array], outputs: Sequence[Array]) -> dict[str, float]:
    """Measure how much of the answers agrees, by the model's task; return {} if the task has no measure."""
    accuracy = model.accuracy if isinstance(model, PixelModel) else None
    if accuracy is None or [each.shape for each in expected] != [each.shape for each in outputs]:
        return {}
    assert isinstance(model, PixelModel)
    options, whole = Options(), Placement(model.input_shape[1], model.input_shape[0])
    one, other = (
        [model.postprocess(model.reduce(given, row, options), whole, options) for row in range(len(expected[0]))]
        for given in (expected, outputs)
    )
    return accuracy.agreement(one, other)


def _in_float32(model: Model) -> Callable[[Array], tuple[Array, ...]]:
    network = model.network()

    def run(items: Array) -> tuple[Array, ...]:
        with torch.inference_mode():
            return tuple(output.numpy() for output in network(torch.from_numpy(items)))

    return run


def first_wrong(count: int, agrees: Callable[[int], bool | None]) -> int | None:
    """Find the first of `count` layers at which a network that ends there is wrong; None for no layers.

    `agrees(k)`: True if the network up to and with layer k is right; None if that cannot be told (the
    engine does not take such a network). Once wrong, it is taken to stay wrong; the last layer is taken to be wrong.
    It is called about log2(count) times.
    """
    if not count:
        return None
    right, wrong = -1, count - 1
    while wrong - right > 1:
        for middle in _from_the_middle(right + 1, wrong - 1):
            answer = agrees(middle)
            if answer is not None:
                right, wrong = (middle, wrong) if answer else (right, middle)
                break
        else:
            break  # No answer for any layer between the two.
    return wrong


def _from_the_middle(first: int, last: int) -> Iterator[int]:
    """Yield the middle, then its neighbours, ever further away."""
    middle = (first + last) // 2
    yield middle
    for distance in range(1, last - first + 1):
        for place in (middle - distance, middle + distance):
            if first <= place <= last:
                yield place
