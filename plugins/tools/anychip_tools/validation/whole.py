"""Comparison of a model's answers on a device with float32 on the CPU, by engine and precision."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from anychip_tools.subjects import in_pytorch
from anychip_tools.validation.layers import (
    LAYER_LIMITS,
    TOLERANCES,
    Difference,
    LayerError,
    TracedNetwork,
    difference,
)
from app.precision.gate import on_cpu, outputs_of
from backends import Backend, BackendError, CompileOptions, EngineRefusedError, OutOfDeviceMemoryError
from backends.contract.backend import Array
from backends.contract.errors import first_line
from backends.engines.engine import DTYPES
from backends.vendors.torch_device import torch_device
from models import Model, TensorModel


@dataclass
class Comparison:
    """Result of one engine in one precision. `verdict`: "agrees", or "differs" or "refused" with the `reason`.

    `errors`: the precision gate's, `limits`: its limits.
    """

    engine: str
    precision: str
    verdict: str
    reason: str = ""
    whole: Difference | None = None
    errors: dict[str, float] = field(default_factory=dict)
    limits: dict[str, float] = field(default_factory=dict)


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
        calibration: Callable[[], Any] | None = None,
    ) -> None:
        """Compute the reference: the model in float32 on the CPU. `items`: uint8 [n, *input_shape]."""
        self.model = model
        self._backend, self._device, self._items = backend, device, items
        self._calibration = calibration
        self._batch = 1 if isinstance(model, TensorModel) and not model.batched else 2
        self._expected = outputs_of(partial(on_cpu, model.network()), items, self._batch)
        self._layers: TracedNetwork | None = None

    def compared(self, engine: str, precision: str) -> Comparison:
        """Load, run and compare. Raises OutOfDeviceMemoryError, DeviceLostError."""
        try:
            executable, report = self._backend.load(
                self.model.network(),
                self._device,
                engine,
                precision,
                (self._batch,),
                options=CompileOptions(calibration=self._calibration),
            )
        except EngineRefusedError as error:
            return Comparison(engine, precision, "refused", str(error))
        try:
            outputs = outputs_of(executable.run, self._items, self._batch)
        except OutOfDeviceMemoryError:
            raise
        except BackendError as error:
            return Comparison(report.engine, precision, "differs", f"it fails: {error}")
        finally:
            executable.close()
        return self._judged(report.engine, precision, outputs)

    def depth(self, precision: str) -> Depth:
        """Compare each layer as PyTorch runs it on the device."""
        limit = LAYER_LIMITS[precision]
        try:
            if self._layers is None:
                self._layers = TracedNetwork(lambda: in_pytorch(self.model), self.model.input_shape, self._batch)
            target = torch_device(self._backend, self._device)
            items = self._items[: self._batch]
            errors = self._layers.errors(items, DTYPES[precision], target, TOLERANCES[precision])
        except Exception as error:  # A device may lack an operator, or memory.
            return Depth(precision, [], None, limit, f"not layer by layer: {first_line(error)[:200]}")
        first = next((each for each in errors if not each.alone.relative <= limit), None)
        return Depth(precision, errors, first, limit)

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
            listed = ", ".join(f"{name} is {errors[name]:.3g} and {limits[name]:g} is allowed" for name in over)
            reasons.append(f"the error {listed}")
        verdict = "differs" if reasons else "agrees"
        return Comparison(engine, precision, verdict, "; ".join(reasons), whole, dict(errors), dict(limits))
