"""An image model without its normalisation: for clients that resize and normalise themselves.

Owns: the form of such an item. Weights, outputs and answers are the image model's. The network is prepared by itself,
because an engine's build depends on the network's input.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from models.contract.measures import Limits
from models.contract.model import Array, Finds, Model, Options
from models.contract.pixel_model import PixelModel
from models.contract.tensors import TensorSpec, item_bytes

if TYPE_CHECKING:
    from models.contract.networks import NormalisedNetwork


@dataclass(frozen=True)
class NormalisedModel(Model):
    """A model with normalised input; weights, outputs and answers are those of `image_model`."""

    image_model: PixelModel

    @classmethod
    def of(cls, image_model: PixelModel) -> NormalisedModel:
        """Build the model; no client can use its name."""
        height, width, channels = image_model.input_shape
        size = item_bytes((TensorSpec("input", "FP32", (channels, height, width)),))
        return cls(
            f"{image_model.name}:input",
            f"{image_model.architecture}-normalised",
            image_model.labels,
            image_model.weights,
            image_model.weights_file,
            (size,),
            image_model,
            weights_sha256=image_model.weights_sha256,
            files=image_model.files,
        )

    @property
    def task(self) -> str:
        return self.image_model.task

    @property
    def finds(self) -> Finds:
        return self.image_model.finds

    @property
    def limits(self) -> Limits:
        return self.image_model.limits

    @property
    def outputs(self) -> tuple[str, ...]:
        return self.image_model.outputs

    def network(self) -> NormalisedNetwork:
        from models.contract.networks import NormalisedNetwork

        return NormalisedNetwork(self.image_model.network()).eval().requires_grad_(False)

    def reduce(self, outputs: Sequence[Array], index: int, options: Options) -> tuple[Array, ...]:
        return self.image_model.reduce(outputs, index, options)

    def reduce_all(self, outputs: Sequence[Array], options: Sequence[Options]) -> list[tuple[Array, ...]]:
        return self.image_model.reduce_all(outputs, options)

    def measures(self, expected: Sequence[Array], outputs: Sequence[Array]) -> dict[str, float]:
        return self.image_model.measures(expected, outputs)

    def items(self, pixels: Array) -> Array:
        """Convert uint8 [n, *image_model.input_shape], the image network's input, to uint8 [n, *input_shape]."""
        import torch
        from torch import nn

        from models.contract.networks import PixelNetwork

        of = self.image_model
        network = PixelNetwork(nn.Identity(), of.input_shape, of.mean, of.std)
        normalised: Any = network.normalise(torch.from_numpy(pixels)).contiguous().numpy()
        return np.asarray(normalised).reshape(len(pixels), -1).view(np.uint8)
