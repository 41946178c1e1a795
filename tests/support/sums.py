"""The smallest model for tests of the gate: its network is the sum of an image's bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from backends import Executable
from models.contract.pixel_model import PixelModel
from models.contract.resize import Whole
from models.contract.task_adapter import AdaptedFile

SHAPE, SIZES = (1, 1, 3), (1, 2, 4)


def sums(pixels: Any) -> Any:
    return np.asarray(pixels, np.float32).sum(axis=(1, 2, 3))[:, None]


class Sums(PixelModel):
    """Its measure is the largest difference; it counts how often its network is asked for. `key`: of its weights."""

    def __init__(
        self,
        weights: str = "official",
        *,
        key: str = "a",
        reference: bool = True,
        infinite: bool = False,
        judge: Any = None,
    ) -> None:
        file = AdaptedFile(Whole((1, 1), "stretch"), ())
        super().__init__("sums", "sums", (), weights, None, SHAPE, "regress", file)
        vars(self).update(key=key, made=0, has_own=reference, may_be_infinite=infinite, judge=judge)

    has_reference = property(lambda self: self.has_own)
    accuracy = property(lambda self: self.judge)
    limits = property(lambda self: {"fp32": {"off": 0.0}, "bf16": {"off": 0.05}, "int8": {"off": 0.1}})

    def network(self) -> Any:
        vars(self)["made"] += 1
        return lambda pixels: (torch.from_numpy(sums(pixels)),)

    def measures(self, expected: Any, outputs: Any) -> dict[str, float]:
        return {"off": round(float(np.nanmax(np.abs(expected[0] - outputs[0]))), 3)}

    def reduce(self, outputs: Any, index: int, options: Any) -> tuple[Any, ...]:
        return (outputs[0][index],)

    def postprocess(self, outputs: Any, placement: Any, options: Any) -> dict[str, Any]:
        return {"sum": float(outputs[0][0])}


class Answering(Executable):
    """Answers as the network, but for what `becomes` makes of it; counts images; batches of a size share memory."""

    def __init__(self, becomes: Any = lambda outputs: outputs, sizes: tuple[int, ...] = SIZES) -> None:
        super().__init__("cpu:0", sizes, SHAPE)
        self.becomes, self.images = becomes, 0
        self.memory = {size: np.empty((size, 1), np.float32) for size in sizes}

    def _execute(self, pixels: Any) -> tuple[Any, ...]:
        self.images += len(pixels)
        memory = self.memory[len(pixels)]
        memory[:] = self.becomes(sums(pixels))
        return (memory,)

    def _release(self) -> None:
        pass


def more_by(errors: dict[int, float]) -> Any:
    """Return a change of answers: more by these, by batch size."""
    return lambda outputs: outputs + np.float32(errors.get(len(outputs), 0))
