"""Opening of the device that a command computes on, and loading of networks there, as `anychip serve` does both.

Must not run anything on a device.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from app.config import Settings, split
from app.precision.gate import compile_options
from app.precision.probes import Calibration
from app.worker.load import load_plugins
from backends import Choice, CompileOptions, choose, simulated
from models import Model, PixelModel


def open_device(settings: Settings) -> tuple[Choice, str]:
    """Open the devices that the settings name; return them and the first one. Raises BackendError."""
    simulated.configure(settings.simulate, settings.null, settings.cache_dir.expanduser())
    load_plugins(split(settings.plugins))
    choice = choose(settings.device)
    return choice, choice.devices[0]


def load_options(
    model: Model, settings: Settings, choice: Choice, precision: str, items: npt.NDArray[np.uint8]
) -> CompileOptions:
    """Return the options with which `anychip serve` loads: gate, calibrated int8. Raises CalibrationError."""
    int8 = precision == "int8" and isinstance(model, PixelModel)
    calibration = Calibration(model, settings.calibrate) if int8 else None  # type: ignore[arg-type]
    given = items if choice.backend.facts.computes else None
    return compile_options(model, given, calibration, settings.cache_dir.expanduser())
