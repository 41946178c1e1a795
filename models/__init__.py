"""Models: architecture, weights, preprocessing, postprocessing, labels. No HTTP, no device names.

Owns: the names the rest of anychip may use.
"""

import pkgutil
from typing import TYPE_CHECKING, Any

from models.contract.errors import ModelError, UnknownModelError, WeightsError, WeightsNotFoundError
from models.contract.model import (
    MASK_FORMS,
    Finds,
    MaskForm,
    Model,
    Options,
    OutputSpec,
    Placement,
)
from models.contract.pixel_model import NormalisedModel, PixelModel
from models.contract.tensors import DATATYPES, InputError, TensorModel, TensorOptions, TensorSpec, datatype_of

if TYPE_CHECKING:
    from models.catalog import ARCHITECTURES, ModelSpec, fetched, open_model, parse_spec
    from models.contract.networks import PixelNetwork
    from models.exports.exported import ExportedModel

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
    "fetched",
    "open_model",
    "parse_spec",
]

_WITH_TORCH = {
    "ExportedModel": "models.exports.exported",
    "PixelNetwork": "models.contract.networks",
    **dict.fromkeys(("ARCHITECTURES", "ModelSpec", "fetched", "open_model", "parse_spec"), "models.catalog"),
}
"""Names that read files or build networks, with their modules; imported on first use, as the server has no torch."""


def __getattr__(name: str) -> Any:
    if name not in _WITH_TORCH:
        raise AttributeError(f"models has no {name}")
    return pkgutil.resolve_name(f"{_WITH_TORCH[name]}:{name}")
