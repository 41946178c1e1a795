"""An image model from behind its normalisation: for clients that resize and normalise themselves.

Owns: what such an item is, and the network around it. Same weights, same outputs and answers as the image model;
made ready by itself, because what a network is given decides what an engine makes of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from models.contract.measures import Limits
from models.contract.model import Array, Finds, Model, Options, PixelNetwork
from models.contract.pixel_model import PixelModel
from models.contract.tensors import TensorSpec, item_bytes, layout


class NormalisedNetwork(nn.Module):
    """uint8 [n, bytes of an item] in, which are float32 [n, 3, height, width]; the outputs of the image network.

    `core` takes the tensor itself; with `inputs` and `places` an engine may hand it over in its own way
    (backends.TensorNetwork).
    """

    form: Literal["program"] = "program"
    file = ""
    batched = True

    def __init__(self, network: PixelNetwork) -> None:
        super().__init__()
        height, width, channels = network.input_shape
        self.core = _Core(network)
        self.inputs = (TensorSpec("input", "FP32", (channels, height, width)),)
        self.places = layout(self.inputs)
        self.input_shape = (item_bytes(self.inputs),)

    def cast(self, dtype: torch.dtype) -> NormalisedNetwork:
        """Cast the image network; the input stays float32."""
        self.core.network.cast(dtype)
        return self

    def tensors(self, items: Tensor) -> tuple[Tensor, ...]:
        """uint8 [n, bytes of an item] -> what `core` takes."""
        [(start, stop)], [spec] = self.places, self.inputs
        return (items[:, start:stop].view(torch.float32).reshape(-1, *spec.shape),)

    def forward(self, items: Tensor) -> tuple[Tensor, ...]:
        """uint8 [n, bytes of an item] -> outputs, each [n, ...]."""
        outputs: tuple[Tensor, ...] = self.core(*self.tensors(items))
        return outputs


class _Core(nn.Module):
    def __init__(self, network: PixelNetwork) -> None:
        super().__init__()
        self.network = network

    def forward(self, normalised: Tensor) -> tuple[Tensor, ...]:
        # Laid out as what the image network makes of its pixels, so that the same kernels run. By permuting: torch_npu
        # refuses contiguous(memory_format=channels_last).
        laid_out = normalised.to(self.network.core_dtype).permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
        return self.network.compute(laid_out)


@dataclass(frozen=True)
class NormalisedModel(Model):
    """`image_model` is the model whose weights, outputs and answers these are."""

    image_model: PixelModel

    @classmethod
    def of(cls, image_model: PixelModel) -> NormalisedModel:
        """Its name is no name that a client could use."""
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
            weights_pinned=image_model.weights_pinned,
        )

    @property
    def task(self) -> str:
        """The image model's task."""
        return self.image_model.task

    @property
    def finds(self) -> Finds:
        """What the image model finds."""
        return self.image_model.finds

    @property
    def limits(self) -> Limits:
        """The image model's limits."""
        return self.image_model.limits

    @property
    def outputs(self) -> tuple[str, ...]:
        """The names of the image model's outputs."""
        return self.image_model.outputs

    def network(self) -> NormalisedNetwork:
        """The image model's network behind this input. Raises WeightsError."""
        return NormalisedNetwork(self.image_model.network()).eval().requires_grad_(False)

    def reduce(self, outputs: Sequence[Array], index: int, options: Options) -> tuple[Array, ...]:
        """Reduce as the image model does."""
        return self.image_model.reduce(outputs, index, options)

    def reduce_all(self, outputs: Sequence[Array], options: Sequence[Options]) -> list[tuple[Array, ...]]:
        """Reduce a batch as the image model does."""
        return self.image_model.reduce_all(outputs, options)

    def measures(self, expected: Sequence[Array], outputs: Sequence[Array]) -> dict[str, float]:
        """The image model's measures."""
        return self.image_model.measures(expected, outputs)

    def items(self, pixels: Array) -> Array:
        """uint8 [n, *image_model.input_shape], as the image network takes it -> uint8 [n, *input_shape]."""
        network = PixelNetwork(nn.Identity(), self.image_model.input_shape, *self.image_model.normalisation)
        normalised: Any = network.normalise(torch.from_numpy(pixels)).contiguous().numpy()
        return np.asarray(normalised).reshape(len(pixels), -1).view(np.uint8)
