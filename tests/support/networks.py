"""Networks and pixels for the tests of engines: small, and with answers that can be told apart."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from models.contract.model import Placement
from models.yolo.model import YOLO


class Brightness(nn.Module):
    """Mean and brightest byte of an image; the call after `sound_calls` raises `fault`."""

    input_shape = (8, 6, 3)

    def __init__(self, fault: Exception | None = None, sound_calls: int = 0) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0), requires_grad=False)
        self.fault, self.sound_calls = fault, sound_calls

    def cast(self, dtype: torch.dtype) -> Brightness:
        return self

    def forward(self, pixels: Tensor) -> tuple[Tensor, ...]:
        if self.fault is not None:
            self.sound_calls -= 1
            if self.sound_calls < 0:
                raise self.fault
        means = pixels.to(torch.float32).mean(dim=(1, 2, 3)) * self.scale / 2
        return means, pixels.to(torch.int32).amax(dim=(1, 2, 3))


def images(count: int, shape: tuple[int, int, int]) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Draw coloured blocks under noise, no two images alike; height and width are multiples of 4."""
    generator = np.random.default_rng(count)
    blocks = generator.integers(0, 220, (count, 4, 4, 3)).repeat(shape[0] // 4, axis=1).repeat(shape[1] // 4, axis=2)
    return (blocks + generator.integers(0, 36, (count, *shape))).astype(np.uint8)


def letterboxed(detector: YOLO, image: npt.NDArray[np.uint8]) -> tuple[Tensor, Placement]:
    out = torch.full(detector.input_shape, 7, dtype=torch.uint8)
    height, width = image.shape[:2]
    return out, detector.preprocess(torch.from_numpy(image), out, width, height)
