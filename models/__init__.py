"""Models: architecture, weights, preprocessing, postprocessing, labels. No HTTP, no device names."""

import pkgutil
from typing import TYPE_CHECKING, Any

from models.contract.errors import ModelError as ModelError
from models.contract.errors import UnknownModelError as UnknownModelError
from models.contract.errors import WeightsError as WeightsError
from models.contract.errors import WeightsNotFoundError as WeightsNotFoundError
from models.contract.model import MASK_FORMS as MASK_FORMS
from models.contract.model import Finds as Finds
from models.contract.model import Model as Model
from models.contract.model import Options as Options
from models.contract.model import OutputSpec as OutputSpec
from models.contract.model import Placement as Placement
from models.contract.pixel_model import NormalisedModel as NormalisedModel
from models.contract.pixel_model import PixelModel as PixelModel
from models.contract.tensors import DATATYPES as DATATYPES
from models.contract.tensors import InputError as InputError
from models.contract.tensors import TensorModel as TensorModel
from models.contract.tensors import TensorOptions as TensorOptions
from models.contract.tensors import TensorSpec as TensorSpec

if TYPE_CHECKING:
    from models.catalog import ARCHITECTURES as ARCHITECTURES
    from models.catalog import ModelSpec as ModelSpec
    from models.catalog import fetched as fetched
    from models.catalog import open_model as open_model
    from models.catalog import parse_spec as parse_spec
    from models.exports.exported import ExportedModel as ExportedModel

_WITH_TORCH = {
    "ExportedModel": "models.exports.exported",
    **dict.fromkeys(("ARCHITECTURES", "ModelSpec", "fetched", "open_model", "parse_spec"), "models.catalog"),
}
"""Names that read files or build networks, with their modules; imported on first use, as the server has no torch."""


def __getattr__(name: str) -> Any:
    if name not in _WITH_TORCH:
        raise AttributeError(f"models has no {name}")
    return pkgutil.resolve_name(f"{_WITH_TORCH[name]}:{name}")
