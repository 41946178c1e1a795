"""Image models whose task another package brings.

Owns: the model around an adapter (models.contract.task_adapter). The network, its size, batches and normalisation are
those of every exported file (models.exports.images).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from models.contract.model import Array, Finds, Options, OutputSpec, Placement
from models.contract.task_adapter import AdaptedFile, TaskAdapter, made
from models.exports.images import ExportedDetector


@dataclass(frozen=True)
class AdaptedModel(ExportedDetector):
    """`adapter`: the entry point's name; `file`: what it is told of the file."""

    adapter: str = field(kw_only=True)
    file: AdaptedFile = field(kw_only=True)

    @property
    def finds(self) -> Finds:
        """Something that the adapter alone knows."""
        return "other"

    @property
    def outputs(self) -> tuple[str, ...]:
        """By number."""
        return tuple(f"output{number}" for number in range(len(self.file.shapes)))

    @property
    def _adapter(self) -> TaskAdapter:
        return made(self.adapter, self.file)

    def preprocess(self, image: Tensor, out: Tensor, width: int, height: int) -> Placement:
        """Place an image where the adapter does, else where every exported file has it."""
        placed = self._adapter.place(image.numpy(), out.numpy(), width, height)
        return super().preprocess(image, out, width, height) if placed is None else placed

    def geometry(self, width: int, height: int) -> None:
        """Only the adapter knows."""

    def reduce(self, outputs: Sequence[Array], index: int, options: Options) -> tuple[Array, ...]:
        """What the adapter keeps of them."""
        kept = self._adapter.reduce([output[index] for output in outputs], options)
        return tuple(np.array(each) for each in kept)

    def postprocess(self, outputs: Sequence[Array], placement: Placement, options: Options) -> dict[str, Any]:
        """The adapter's entry, with the image's size."""
        found = self._adapter.postprocess(outputs, placement, options)
        return {**found, "width": placement.width, "height": placement.height}

    @property
    def answers(self) -> tuple[OutputSpec, ...]:
        """No tensors: the answer is JSON."""
        return ()

    def tensors(self, outputs: Sequence[Array], placement: Placement, options: Options) -> dict[str, Array]:
        """None."""
        return {}
