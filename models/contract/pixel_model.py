"""Image models: a network of pixels, and the task that turns its outputs into answers.

Owns: joining the two into a model, the same for every network and every task. Must not know either.

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

from models.contract.geometry import Geometry
from models.contract.measures import Accuracy, Limits
from models.contract.model import Array, Finds, Model, Options, OutputSpec, Placement
from models.contract.task_adapter import AdaptedFile, TaskAdapter, made, owned

if TYPE_CHECKING:
    from torch import Tensor

    from models.contract.networks import PixelNetwork


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
        """Adapter of the task."""
        return made(self.task_name, self.file)

    @property
    def task(self) -> str:
        """Name of the task."""
        return self.task_name

    @property
    def finds(self) -> Finds:
        """Content of the task's entries."""
        return self.adapter.finds

    @property
    def limits(self) -> Limits:
        """Limits of the task."""
        return self.adapter.limits

    @property
    def accuracy(self) -> Accuracy | None:
        """The task's measure of right answers."""
        return self.adapter.accuracy

    @property
    def outputs(self) -> tuple[str, ...]:
        """The task's names of the outputs."""
        return self.adapter.outputs

    @property
    def image_model(self) -> PixelModel:
        """The image model that postprocesses these outputs."""
        return self

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
            from models.contract.grey import grey_image

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
        """Return the arrays that the task keeps of an item's outputs."""
        return owned(self.adapter.reduce([each[index] for each in outputs], options))

    def reduce_all(self, outputs: Sequence[Array], options: Sequence[Options]) -> list[tuple[Array, ...]]:
        """Return the arrays that the task keeps of each item of a batch."""
        return self.adapter.reduce_all(outputs, options)

    def postprocess(self, outputs: Sequence[Array], placement: Placement, options: Options) -> dict[str, Any]:
        """Turn, in the server, a result of `reduce` into an entry of "predictions" (docs/api.md). Pure function."""
        return _sized(self.adapter.postprocess(outputs, placement, options), placement)

    def postprocess_all(
        self, outputs: Sequence[Sequence[Array]], placements: Sequence[Placement], options: Options
    ) -> list[dict[str, Any]]:
        """Postprocess several images, together if that is faster than one after the other."""
        entries = self.adapter.postprocess_all(outputs, placements, options)
        return [_sized(*each) for each in zip(entries, placements, strict=True)]

    @property
    def answers(self) -> tuple[OutputSpec, ...]:
        """Tensors that `tensors` returns, of a batch: the batch's dimension is in front."""
        return self.adapter.answers

    def tensors(self, outputs: Sequence[Array], placement: Placement, options: Options) -> dict[str, Array]:
        """Turn, in the server, the result of `reduce` into one image's answer as tensors, by the names of `answers`."""
        return self.adapter.tensors(outputs, placement, options)

    def measures(self, expected: Sequence[Array], outputs: Sequence[Array]) -> dict[str, float]:
        """Compute the task's measures."""
        return self.adapter.measures(expected, outputs)


def _sized(entry: Mapping[str, Any], placement: Placement) -> dict[str, Any]:
    return {**entry, "width": placement.width, "height": placement.height}
