"""What a network is: architecture, weights, preprocessing, postprocessing, labels. No HTTP, no device names.

Owns: the names the rest of anychip may use.
"""

from models.catalog import ARCHITECTURES, ModelSpec, open_model, parse_spec
from models.contract.errors import ModelError, UnknownModelError, WeightsError, WeightsNotFoundError
from models.contract.model import (
    MASK_FORMS,
    Finds,
    MaskForm,
    Model,
    Options,
    OutputSpec,
    PixelNetwork,
    Placement,
)
from models.contract.pixel_model import PixelModel
from models.contract.tensors import DATATYPES, InputError, TensorModel, TensorOptions, TensorSpec, datatype_of
from models.exports.exported import ExportedModel
from models.tasks.normalised import NormalisedModel

__all__ = [
    "ARCHITECTURES",
    "DATATYPES",
    "MASK_FORMS",
    "ExportedModel",
    "Finds",
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
