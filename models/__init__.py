"""What a network is: architecture, weights, preprocessing, postprocessing, labels. No HTTP, no device names.

Owns: the names the rest of anychip may use.
"""

from models.catalog import ARCHITECTURES, ModelSpec, open_model, parse_spec
from models.model import (
    Model,
    ModelError,
    Options,
    OutputSpec,
    PixelNetwork,
    Placement,
    Task,
    UnknownModelError,
    WeightsError,
    WeightsNotFoundError,
)

__all__ = [
    "ARCHITECTURES",
    "Model",
    "ModelError",
    "ModelSpec",
    "Options",
    "OutputSpec",
    "PixelNetwork",
    "Placement",
    "Task",
    "UnknownModelError",
    "WeightsError",
    "WeightsNotFoundError",
    "open_model",
    "parse_spec",
]
