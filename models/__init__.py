"""What a network is: architecture, weights, preprocessing, postprocessing, labels. No HTTP, no device names.

Owns: the names the rest of anychip may use.
"""

from models.catalog import ARCHITECTURES, ModelSpec, open_model, parse_spec
from models.exported import ExportedModel
from models.model import (
    MASK_FORMS,
    OBJECT_TASKS,
    MaskForm,
    Model,
    ModelError,
    Options,
    OutputSpec,
    PixelModel,
    PixelNetwork,
    Placement,
    Task,
    UnknownModelError,
    WeightsError,
    WeightsNotFoundError,
)
from models.normalised import NormalisedModel
from models.tensors import DATATYPES, InputError, TensorModel, TensorOptions, TensorSpec, datatype_of

__all__ = [
    "ARCHITECTURES",
    "DATATYPES",
    "MASK_FORMS",
    "OBJECT_TASKS",
    "ExportedModel",
    "InputError",
    "MaskForm",
    "Model",
    "ModelError",
    "ModelSpec",
    "NormalisedModel",
    "Options",
    "OutputSpec",
    "PixelModel",
    "PixelNetwork",
    "Placement",
    "Task",
    "TensorModel",
    "TensorOptions",
    "TensorSpec",
    "UnknownModelError",
    "WeightsError",
    "WeightsNotFoundError",
    "datatype_of",
    "open_model",
    "parse_spec",
]
