"""How commands load networks on the device that they compute on: as `anychip serve` does.

Must not choose the device; app.tools.device does.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from app.config import Settings
from app.precision.gate import compile_options
from app.precision.probes import Calibration
from backends import Choice, CompileOptions
from models import Model, PixelModel


def load_options(
    model: Model, settings: Settings, choice: Choice, precision: str, items: npt.NDArray[np.uint8]
) -> CompileOptions:
    """How `anychip serve` loads a network: through the gate, int8 calibrated. Raises CalibrationError."""
    int8 = precision == "int8" and isinstance(model, PixelModel)
    calibration = Calibration(model, settings.calibrate) if int8 else None  # type: ignore[arg-type]
    given = items if choice.backend.facts.computes else None
    return compile_options(model, given, calibration, settings.cache_dir.expanduser())
