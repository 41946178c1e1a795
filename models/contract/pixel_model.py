"""Image models: a network of pixels, and the task that turns its outputs into answers.

Owns: joining the two into a model, the same for every network and every task, and its form without normalisation. Must
not know either.

    bytes ─► (app decodes) ─► Resize ─► uint8 pixels ─► PixelNetwork on a device ─► outputs
                                │ Placement ────────────────────────────┐            │
                   predictions ◄┴─ TaskAdapter.postprocess (server) ◄───┴─ TaskAdapter.reduce (worker)
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from models.contract.measures import Accuracy, Limits
from models.contract.model import Array, Finds, Model, Options, OutputSpec, Placement
from models.contract.resize import Geometry, grey_image
from models.contract.task_adapter import AdaptedFile, TaskAdapter, made, owned
from models.contract.tensors import TensorSpec, item_bytes

if TYPE_CHECKING:
    from torch import Tensor

    from models.contract.networks import NormalisedNetwork, PixelNetwork


Form = Literal["pixels", "openvino", "finished"]
"""Form of a network of images (backends.Form)."""


@dataclass(frozen=True)
class PixelModel(Model):
    """An image model: one item is uint8 [height, width, 3]. `task_name` and `file` define the task.

    `mean` and `std`: of each RGB channel, for pixels in 0..1.
    """

    input_shape: tuple[int, int, int]
    task_name: str
    file: AdaptedFile
    mean: tuple[float, ...] = (0.0, 0.0, 0.0)
    std: tuple[float, ...] = (1.0, 1.0, 1.0)

    @abstractmethod
    def network(self) -> PixelNetwork:
        """Build the network on the CPU, with BatchNorm fused if that pays."""

    @property
    def form(self) -> Form:
        """Form of the network."""
        return "pixels"

    @cached_property
    def adapter(self) -> TaskAdapter:
        return made(self.task_name, self.file)

    @property
    def task(self) -> str:
        return self.task_name

    @property
    def finds(self) -> Finds:
        return self.adapter.finds

    @property
    def limits(self) -> Limits:
        return self.adapter.limits

    @property
    def accuracy(self) -> Accuracy | None:
        return self.adapter.accuracy

    @property
    def outputs(self) -> tuple[str, ...]:
        return self.adapter.outputs

    def decode_size(self, width: int, height: int) -> tuple[int, int]:
        """Return the smallest (width, height) for a decode at reduced scale of an image of this displayed size."""
        return self.file.resize.decode_size(width, height)

    def preprocess(self, image: Tensor, out: Tensor, width: int, height: int) -> Placement:
        """Place an image in the network's input, by the task if it does so, else by the file's `resize`.

        `image`: uint8 [h, w, 3] RGB, possibly of reduced scale; `out`: uint8 `input_shape`, every byte is written;
        `width` and `height`: the image's displayed size in full. Runs in decoder processes: pure, reentrant, and heavy
        work releases the interpreter lock.
        """
        if self.file.grey:
            image = grey_image(image)
        placed = self.adapter.place(image.numpy(), out.numpy(), width, height)
        return self.file.resize.preprocess(image, out, width, height) if placed is None else placed

    def placement(self, width: int, height: int) -> Placement:
        """Return the placement that `preprocess` returns for an image of this displayed size."""
        return self.file.resize.placement(width, height)

    def geometry(self, width: int, height: int) -> Geometry | None:
        """Return the geometry of `preprocess` for an image of this displayed size that is decoded in full. None: a
        device cannot do it.
        """
        if self.file.grey or type(self.adapter).place is not TaskAdapter.place:
            return None  # Devices make no image grey first, and cannot place images as such a task does.
        geometry = self.file.resize.geometry(width, height)
        return geometry if geometry is not None and geometry.interpolation in ("bilinear", "bicubic") else None

    def reduce(self, outputs: Sequence[Array], index: int, options: Options) -> tuple[Array, ...]:
        return owned(self.adapter.reduce([each[index] for each in outputs], options))

    def reduce_all(self, outputs: Sequence[Array], options: Sequence[Options]) -> list[tuple[Array, ...]]:
        return self.adapter.reduce_all(outputs, options)

    def postprocess(self, outputs: Sequence[Array], placement: Placement, options: Options) -> dict[str, Any]:
        """Turn, in the server, a result of `reduce` into an entry of "predictions" (docs/api.md). Pure function."""
        return _sized(self.adapter.postprocess(outputs, placement, options), placement)

    def postprocess_all(
        self, outputs: Sequence[Sequence[Array]], placements: Sequence[Placement], options: Options
    ) -> list[dict[str, Any]]:
        entries = self.adapter.postprocess_all(outputs, placements, options)
        return [_sized(*each) for each in zip(entries, placements, strict=True)]

    @property
    def answers(self) -> tuple[OutputSpec, ...]:
        return self.adapter.answers

    def tensors(self, outputs: Sequence[Array], placement: Placement, options: Options) -> dict[str, Array]:
        return self.adapter.tensors(outputs, placement, options)

    def measures(self, expected: Sequence[Array], outputs: Sequence[Array]) -> dict[str, float]:
        return self.adapter.measures(expected, outputs)


def _sized(entry: Mapping[str, Any], placement: Placement) -> dict[str, Any]:
    return {**entry, "width": placement.width, "height": placement.height}


@dataclass(frozen=True)
class NormalisedModel(Model):
    """An image model without its normalisation, for clients that resize and normalise themselves. Weights, outputs and
    answers are those of `image_model`. It is prepared by itself, because an engine's build depends on the input.
    """

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
        """Normalise images, and return each as the bytes of its float32 tensor.

        `pixels`: uint8 [n, *image_model.input_shape]. Returns uint8 [n, *input_shape].
        """
        import torch
        from torch import nn

        from models.contract.networks import PixelNetwork

        of = self.image_model
        network = PixelNetwork(nn.Identity(), of.input_shape, of.mean, of.std)
        normalised: Any = network.normalise(torch.from_numpy(pixels)).contiguous().numpy()
        return np.asarray(normalised).reshape(len(pixels), -1).view(np.uint8)
